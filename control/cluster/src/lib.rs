//! The Kubernetes control plane: resource types, scheduling, controllers.
