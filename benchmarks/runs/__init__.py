"""What a run costs: overlap, ledger, kept samples, growth."""
