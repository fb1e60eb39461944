"""``torch.fft`` on MeshTensors: transforms along sharded dims by all-to-all."""
