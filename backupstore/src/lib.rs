//! Backups in Longhorn's layout on S3, NFS or a directory. Not built yet.
