"""The Ray Serve deployments, vLLM's connector and front end, and the messages between them."""
