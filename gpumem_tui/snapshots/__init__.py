"""PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`), written, read and explained. No torch."""
