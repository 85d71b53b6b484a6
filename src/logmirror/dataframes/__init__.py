"""Archives as Spark DataFrames: `LogmirrorArchive`, a PySpark Data Source."""

from logmirror.dataframes.source import LogmirrorArchive

__all__ = ["LogmirrorArchive"]
