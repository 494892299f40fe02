"""The Monitor: every GPU's memory as one ledger, its history, and the processes that hold it."""
