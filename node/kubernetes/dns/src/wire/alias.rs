//! Responses behind aliases: the records of a response to one question, moved into that to another.
//!
//! All bytes after the question move by the same distance, and so do the offsets that pointers have.
//! So their length does not change, and a pointer is changed where it is. The name of the former
//! question is that of the last alias: pointers to it lead there.
//!
//! Pointers are looked for in owners and in data of the types that may have compressed names
//! according to RFC 1035 and RFC 3597, if the data are encoded as their type has it. Other data are
//! bytes. What points to no name, such as into the header, cannot be read before and is left as it is.

use super::{
    Answer, CNAME, HEADER_BYTES, INTERNET, KIND_BYTES, Name, Place, SOA, Section, pointer_to,
    step_over,
};

impl Answer {
    /// The response to another question, of the same type: CNAMEs with this TTL that lead from its
    /// name by these names to the name of this question, then the records of this response. `names`
    /// are encoded, and the last is the name of this question. A record with a name that a pointer
    /// cannot reach any more, beyond 16 KiB, is omitted with all after it.
    pub fn behind(&self, question: &[u8], names: &[Vec<u8>], ttl: u32) -> Answer {
        let mut moved = Answer {
            bytes: [&[0; HEADER_BYTES], question].concat(),
            question: HEADER_BYTES + question.len(),
            records: Vec::new(),
            code: self.code,
            truncated: self.truncated,
        };
        let mut of_name = HEADER_BYTES;
        for name in names {
            let owner = moved.bytes.len();
            let (Some(pointer), Ok(length)) = (pointer_to(of_name), u16::try_from(name.len()))
            else {
                moved.truncated = true;
                return moved;
            };
            moved.bytes.extend(pointer);
            let body = moved.bytes.len();
            moved.bytes.extend(CNAME.to_be_bytes());
            moved.bytes.extend(INTERNET.to_be_bytes());
            moved.bytes.extend(ttl.to_be_bytes());
            moved.bytes.extend(length.to_be_bytes());
            of_name = moved.bytes.len();
            moved.bytes.extend_from_slice(name);
            moved.records.push(Place {
                section: Section::Answer,
                kind: CNAME,
                owner,
                body,
                end: moved.bytes.len(),
            });
        }
        let start = moved.bytes.len();
        moved.bytes.extend_from_slice(&self.bytes[self.question..]);
        // The name of the question is now that of the last alias; all after it has moved as one.
        let new_place = |old: usize| match old {
            old if old >= self.question => Some(old - self.question + start),
            old if (HEADER_BYTES..self.question - KIND_BYTES).contains(&old) => {
                Some(old - HEADER_BYTES + of_name)
            }
            _ => None,
        };
        for place in &self.records {
            let [owner, body, end] =
                [place.owner, place.body, place.end].map(|at| at - self.question + start);
            for name in place.names(&self.bytes) {
                let Some((at, to)) = name.pointer else {
                    continue;
                };
                // What points to no name is nothing that could be read, here or there.
                let Some(to) = new_place(to) else { continue };
                let Some(pointer) = pointer_to(to) else {
                    moved.bytes.truncate(owner);
                    moved.truncated = true;
                    return moved;
                };
                let at = at - self.question + start;
                moved.bytes[at..at + 2].copy_from_slice(&pointer);
            }
            moved.records.push(Place {
                owner,
                body,
                end,
                ..place.clone()
            });
        }
        moved
    }
}

impl Place {
    /// The names that may be compressed: the owner, and those in data that are encoded as their type
    /// has it. `bytes` are those of the message.
    fn names(&self, bytes: &[u8]) -> Vec<Name> {
        let owner = step_over(bytes, self.owner);
        let in_data = bytes.get(..self.end).and_then(|bytes| {
            let (mut at, count) = before_names(self.kind, bytes, self.data().start)?;
            let mut names = Vec::new();
            for _ in 0..count {
                let name = step_over(bytes, at)?;
                at = name.end;
                names.push(name);
            }
            Some(names)
        });
        owner
            .into_iter()
            .chain(in_data.unwrap_or_default())
            .collect()
    }
}

/// Where in data of this type the names begin, and how many there are. `None` for types without, and
/// for those that are newer than RFC 3597, which forbids to compress names in them.
fn before_names(kind: u16, bytes: &[u8], data: usize) -> Option<(usize, usize)> {
    let (fixed, count) = match kind {
        // NS, MD, MF, CNAME, MB, MG, MR, PTR, NXT, DNAME
        2..=5 | 7..=9 | 12 | 30 | 39 => (0, 1),
        // SOA, MINFO, RP
        SOA | 14 | 17 => (0, 2),
        // MX, AFSDB, RT, KX
        15 | 18 | 21 | 36 => (2, 1),
        // PX
        26 => (2, 2),
        // SRV
        33 => (6, 1),
        // SIG, RRSIG
        24 | 46 => (18, 1),
        // NAPTR: two numbers and three strings
        35 => {
            let mut at = data + 4;
            for _ in 0..3 {
                at += 1 + usize::from(*bytes.get(at)?);
            }
            return Some((at, 1));
        }
        _ => return None,
    };
    Some((data + fixed, count))
}
