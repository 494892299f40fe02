"""The Plan screen: what-if for a model of the catalog, and for a command."""
