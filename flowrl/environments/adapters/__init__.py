"""Environments of other packages: `PACKAGE/NAME`. `environment_row.ADAPTERS` is the list of them."""
