"""Programs for a real GPU, to prove the simulated one: `record` writes down what a GPU did, `compare` shows where they
differ."""
