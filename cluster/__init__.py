"""Configuration, placement, transport, telemetry, the command line and the quickstart pair."""
