"""Commands that kill processes of real runs, or make their parts fail: `python -m tests.faults.kills`."""
