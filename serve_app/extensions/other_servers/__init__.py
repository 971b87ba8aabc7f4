"""The APIs of Kokoro-FastAPI, Mistral, nari, vLLM-Omni and VoxServe."""
