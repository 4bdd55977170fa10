//! What targets have in common: input that consists of parts.

/// Takes parts off the front of an input. An input that ends early has short or empty parts, so none is wasted.
pub(crate) struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    pub(crate) fn of(input: &'a [u8]) -> Self {
        Self(input)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub(crate) fn number(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(crate) fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Two bytes of length, then that many bytes.
    pub(crate) fn sized(&mut self) -> &'a [u8] {
        let length = self.number();
        self.bytes(length.into())
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }
}

/// A part for [`Parts::sized`].
pub(crate) fn sized(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).expect("a seed is short");
    [&length.to_le_bytes(), bytes].concat()
}
