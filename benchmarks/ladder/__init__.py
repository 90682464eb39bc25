"""CoorDL's mechanisms one after the other, on storage of a fixed speed: MinIO, shared fetching, shared prep."""
