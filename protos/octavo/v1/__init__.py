"""The public contract: what protoc wrote from the .proto files beside this one."""
