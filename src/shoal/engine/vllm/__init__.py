"""The vLLM engine (docs/vllm.md): `client` in Shoal's process, `server` and `extension` in one of vLLM's own environment."""
