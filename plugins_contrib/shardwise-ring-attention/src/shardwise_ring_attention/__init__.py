"""Ring attention: scaled dot product attention whose sequence is sharded, as a plugin of shardwise."""
