//! The CSI driver `driver.longhorn.io`. Not built yet.
