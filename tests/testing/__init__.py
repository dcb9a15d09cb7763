"""What `flowrl.testing` gives to users' tests."""
