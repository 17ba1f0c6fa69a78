"""What a machine with a GPU is asked to do: `make gpu-check`, `make gpu-papers` (docs/how-to/gpu.md)."""
