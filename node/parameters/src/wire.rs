//! A strict check of the wire format, before the lenient decoder.
//!
//! A protobuf decoder skips unknown fields, lets the last of two values win, and often takes
//! arbitrary text for an almost empty message. For parameters that a machine reads once, that is
//! wrong: if a parameter of a newer release is silently dropped, or a bootstrap is hidden behind a
//! registration, it is noticed only when the cluster has the wrong shape. So every byte must belong
//! to a known field with the right wire type, a field may be set at most once (unless it is
//! repeated), and at most one field of a oneof may be set.
//!
//! The known fields are those of [`hearth_api::schema`], whose tables are generated from the proto
//! files.

use hearth_api::schema::{Field, Kind, Message};

use super::Problem;

/// Checks `bytes` as a message of the given type.
pub(super) fn check(message: &Message, bytes: &[u8]) -> Result<(), Problem> {
    walk(message, bytes, "")
}

fn walk(message: &Message, mut rest: &[u8], path: &str) -> Result<(), Problem> {
    let mut seen: Vec<&Field> = Vec::new();
    while !rest.is_empty() {
        let (number, wire_type) = key(&mut rest, path)?;
        let Some(field) = message.fields.iter().find(|f| f.number == number) else {
            return Err(Problem::UnknownField {
                path: path.to_owned(),
                number,
            });
        };
        let path = join(path, field.name);
        match (&field.kind, wire_type) {
            (Kind::Varint, 0) => {
                varint(&mut rest, &path)?;
            }
            (Kind::Fixed64, 1) => {
                rest = rest.get(8..).ok_or_else(|| {
                    Problem::malformed(&path, format!("expected 8 bytes, got {}", rest.len()))
                })?;
            }
            (Kind::Bytes, 2) => {
                content(&mut rest, &path)?;
            }
            (Kind::Message(inner), 2) => walk(inner, content(&mut rest, &path)?, &path)?,
            _ => {
                return Err(Problem::malformed(
                    &path,
                    format!("unexpected wire type {wire_type}"),
                ));
            }
        }
        only_one(field, &seen, &path)?;
        // Do not collect repeated fields: there may be a hundred thousand, and none of them
        // excludes another.
        if !field.repeated {
            seen.push(field);
        }
    }
    Ok(())
}

fn only_one(field: &Field, seen: &[&Field], path: &str) -> Result<(), Problem> {
    for other in seen {
        if !field.repeated && other.number == field.number {
            return Err(Problem::Twice {
                field: path.to_owned(),
            });
        }
        if field.oneof.is_some() && other.oneof == field.oneof && other.number != field.number {
            return Err(Problem::Both {
                first: other.name,
                second: field.name,
            });
        }
    }
    Ok(())
}

fn key(rest: &mut &[u8], path: &str) -> Result<(u32, u8), Problem> {
    let key = varint(rest, path)?;
    match u32::try_from(key >> 3) {
        // Field numbers have 29 bits; zero is not a field number.
        Ok(number @ 1..=0x1fff_ffff) => Ok((number, (key & 7) as u8)),
        _ => Err(Problem::malformed(path, "invalid field number")),
    }
}

fn content<'a>(rest: &mut &'a [u8], path: &str) -> Result<&'a [u8], Problem> {
    let length = varint(rest, path)?;
    let split = usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length));
    let Some((content, after)) = split else {
        return Err(Problem::malformed(
            path,
            format!("expected {length} bytes, got {}", rest.len()),
        ));
    };
    *rest = after;
    Ok(content)
}

fn varint(rest: &mut &[u8], path: &str) -> Result<u64, Problem> {
    let mut value = 0_u64;
    for shift in (0..70).step_by(7) {
        let Some((&byte, after)) = rest.split_first() else {
            return Err(Problem::malformed(path, "truncated varint"));
        };
        *rest = after;
        if shift == 63 && byte > 1 {
            break;
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Problem::malformed(path, "varint of more than 64 bits"))
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

#[cfg(test)]
mod tests {
    use hearth_api::schema::NODE_PARAMETERS;
    use prost::Message as _;
    use prost_types::field_descriptor_proto::{Label, Type};
    use prost_types::{DescriptorProto, FileDescriptorSet};

    use super::*;

    /// All message types by their full name, with a leading dot.
    fn message_types() -> Vec<(String, DescriptorProto)> {
        fn add(prefix: &str, message: &DescriptorProto, into: &mut Vec<(String, DescriptorProto)>) {
            let name = format!("{prefix}.{}", message.name());
            for nested in &message.nested_type {
                add(&name, nested, into);
            }
            into.push((name, message.clone()));
        }
        let set = FileDescriptorSet::decode(hearth_api::FILE_DESCRIPTOR_SET).unwrap();
        let mut all = Vec::new();
        for file in &set.file {
            for message in &file.message_type {
                add(&format!(".{}", file.package()), message, &mut all);
            }
        }
        all
    }

    fn compare(table: &Message, name: &str, types: &[(String, DescriptorProto)]) {
        let (_, proto) = types.iter().find(|(n, _)| n == name).unwrap();
        assert_eq!(table.fields.len(), proto.field.len(), "fields of {name}");
        for (ours, theirs) in table.fields.iter().zip(&proto.field) {
            let what = format!("{name}.{}", theirs.name());
            assert_eq!(ours.name, theirs.name(), "{what}");
            assert_eq!(ours.number as i32, theirs.number(), "{what}");
            assert_eq!(ours.repeated, theirs.label() == Label::Repeated, "{what}");
            let oneof = theirs
                .oneof_index
                .map(|index| proto.oneof_decl[index as usize].name());
            assert_eq!(ours.oneof, oneof, "{what}");
            match (&ours.kind, theirs.r#type()) {
                (Kind::Varint, Type::Bool | Type::Enum | Type::Uint32 | Type::Uint64)
                | (Kind::Fixed64, Type::Fixed64)
                | (Kind::Bytes, Type::Bytes | Type::String) => {}
                (Kind::Message(inner), Type::Message) => {
                    compare(inner, theirs.type_name(), types);
                }
                (_, other) => panic!("{what} is {other:?}"),
            }
        }
    }

    #[test]
    fn the_tables_are_the_proto_files() {
        let name = ".hearth.v1.NodeParameters";
        compare(&NODE_PARAMETERS, name, &message_types());
    }

    #[test]
    fn numbers_end_where_64_bits_end() {
        let read = |bytes: &[u8]| {
            let mut rest = bytes;
            varint(&mut rest, "").ok().map(|value| (value, rest.len()))
        };
        assert_eq!(read(&[0x96, 0x01, 0xff]), Some((150, 1)));
        assert_eq!(
            read(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]),
            Some((u64::MAX, 0))
        );
        assert_eq!(
            read(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02]),
            None
        );
        assert_eq!(read(&[0x80; 11]), None);
        assert_eq!(read(&[0x80]), None);
        assert_eq!(read(&[]), None);
    }
}
