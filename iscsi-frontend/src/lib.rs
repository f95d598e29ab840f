//! An iSCSI target (RFC 7143) with a SCSI disk behind it. Not built yet.
