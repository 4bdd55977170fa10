//! The fields of messages that are read strictly: whoever must refuse what it
//! does not know cannot leave that to a protobuf decoder, which skips it.
//!
//! The tables are made from the proto files when this crate is built. A
//! reflection library would give the same at run time, from the descriptor
//! set, with half a megabyte of code that a node needs for nothing else.

/// A message type.
#[derive(Debug)]
pub struct Message {
    /// By their numbers, in ascending order.
    pub fields: &'static [Field],
}

/// A field of a message.
#[derive(Debug)]
pub struct Field {
    /// Its number on the wire.
    pub number: u32,
    /// Its name in the proto file.
    pub name: &'static str,
    /// What it holds.
    pub kind: Kind,
    /// Whether it may stand more than once.
    pub repeated: bool,
    /// Name of the oneof it belongs to.
    pub oneof: Option<&'static str>,
}

/// What a field holds, as far as the wire knows.
#[derive(Debug)]
pub enum Kind {
    /// Enums, truth values and integers of variable length.
    Varint,
    /// Eight bytes.
    Fixed64,
    /// Bytes and strings. That a string is UTF-8 is not said by this.
    Bytes,
    /// Another message.
    Message(&'static Message),
}

include!(concat!(env!("OUT_DIR"), "/schema.rs"));
