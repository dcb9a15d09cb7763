"""What every part of flowrl uses: caches, disks, proxies, tables of tensors, paths of users."""
