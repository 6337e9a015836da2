"""The OpenAI-compatible door: JSON over HTTP into the same requests and streams as gRPC."""
