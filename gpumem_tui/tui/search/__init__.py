"""The Search screen: the form, the trials, the ledger, the curve and the verdict."""
