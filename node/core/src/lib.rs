//! The Hearth node.
