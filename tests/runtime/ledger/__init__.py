"""The ledger of samples, requests and episodes, and its audit."""
