"""What recipes share.

readers.py    text files, tables, JSON lines, Parquet and datasets: all of a file, or an error
prepared.py   a folder of prepared data: made in steps, with a manifest of checksums
scoring.py    scores of a run on a set, written to its folder
similarity.py gradient similarity of a run on an aligned set
"""
