"""The network front: OpenAI's HTTP interface and gRPC over one AsyncEngine."""
