//! The register of views among the voters.
