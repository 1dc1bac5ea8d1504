"""Rollout files: storage, content, and safe reading of files from untrusted machines.

folder      a folder of immutable, content-addressed files, and the interface of every store
bucket      the same store in an S3 bucket, and the signed URLs that nodes use; needs the extra `s3`
rollouts    the two kinds of file: rows, header, signature
columns     the schemas of both kinds, and rows as plain arrays
decode      reads Parquet into columns; checks every page header before decompression
quarantine  reads submissions in a child process
"""
