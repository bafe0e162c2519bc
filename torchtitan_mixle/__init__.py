"""The mixle CausalLM as a TorchTitan train spec; see README.md."""
