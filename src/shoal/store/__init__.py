"""Rollout files: where they are kept, what they hold, and how files of strangers are read.

folder      a folder of immutable, content-addressed files, and what every store does
bucket      the same in an S3 bucket, with the signed URLs by which nodes reach it; needs the extra `s3`
rollouts    the two kinds of file: rows, header, signature
columns     their schemas, and rows as plain arrays
decode      Parquet into columns, bounded page by page before anything is decompressed
quarantine  reads submissions by way of a child process
"""
