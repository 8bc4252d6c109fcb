"""The making of a run: from a person's files to a signed run spec and the blobs that it names.

This package prepares data (documents to token shards), reads run.toml, and writes the genesis checkpoint; `resolve`
combines them. It serves nothing and knows of no swarm: its results are files and bytes.
"""
