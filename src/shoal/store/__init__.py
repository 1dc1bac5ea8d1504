"""Rollout files: where they are kept, what they hold, and how files of strangers are read.

folder      a folder of immutable, content-addressed files, and what every store does
bucket      the same in an S3 bucket; needs the extra `s3`
presign     the signed URLs by which nodes reach a bucket
rollouts    the two kinds of file: rows, header, signature
columns     their schemas, and rows as plain arrays
pages       bounds on a Parquet file's pages, before anything is decompressed
decode      Parquet into columns
quarantine  reads submissions by way of a child process (`reader`)
"""
