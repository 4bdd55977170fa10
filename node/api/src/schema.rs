//! The fields of messages that are decoded strictly: a reader that must reject unknown fields
//! cannot leave that to a protobuf decoder, which skips them.
//!
//! The tables are generated from the proto files when this crate is built. A reflection library
//! would provide the same at run time from the descriptor set, with half a megabyte of code that a
//! node does not need for anything else.

/// A message type.
#[derive(Debug)]
pub struct Message {
    /// In ascending order of their numbers.
    pub fields: &'static [Field],
}

/// A field of a message.
#[derive(Debug)]
pub struct Field {
    /// Its number on the wire.
    pub number: u32,
    /// Its name in the proto file.
    pub name: &'static str,
    /// Its type on the wire.
    pub kind: Kind,
    /// Whether it may occur more than once.
    pub repeated: bool,
    /// The oneof it belongs to.
    pub oneof: Option<&'static str>,
}

/// The type of a field on the wire.
#[derive(Debug)]
pub enum Kind {
    /// Enums, booleans and integers of variable length.
    Varint,
    /// Eight bytes.
    Fixed64,
    /// Bytes and strings. Does not state that a string is UTF-8.
    Bytes,
    /// Another message.
    Message(&'static Message),
}

include!(concat!(env!("OUT_DIR"), "/schema.rs"));
