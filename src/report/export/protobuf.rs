//! The few forms of protocol buffers that a profile.proto needs.
//!
//! A message is a sequence of fields; a field is the varint `number << 3 | kind`, and then a varint (kind 0) or a length
//! and so many bytes (kind 2: texts, messages, packed numbers). <https://protobuf.dev/programming-guides/encoding/>

use crate::profile::format::put_varint;

const KIND_VARINT: u64 = 0;
const KIND_BYTES: u64 = 2;

/// A message that is being put together. Fields whose value is 0 are left out, as their absence means just that.
#[derive(Debug, Default)]
pub(super) struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// A number.
    pub(super) fn number(&mut self, field: u32, value: u64) -> &mut Self {
        if value != 0 {
            put_varint(&mut self.bytes, u64::from(field) << 3 | KIND_VARINT);
            put_varint(&mut self.bytes, value);
        }
        self
    }

    /// Bytes, empty ones too: an entry of a list counts.
    pub(super) fn bytes(&mut self, field: u32, value: &[u8]) -> &mut Self {
        put_varint(&mut self.bytes, u64::from(field) << 3 | KIND_BYTES);
        put_varint(&mut self.bytes, value.len() as u64);
        self.bytes.extend_from_slice(value);
        self
    }

    /// A message within this one.
    pub(super) fn message(&mut self, field: u32, inner: &Self) -> &mut Self {
        self.bytes(field, &inner.bytes)
    }

    /// Several numbers, zeros included.
    pub(super) fn packed(&mut self, field: u32, values: impl IntoIterator<Item = u64>) -> &mut Self {
        let mut packed = Vec::new();
        for value in values {
            put_varint(&mut packed, value);
        }
        self.bytes(field, &packed)
    }

    /// The whole.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the encoding's own documentation.
    #[test]
    fn as_documented() {
        let mut message = Message::default();
        message.number(1, 150);
        assert_eq!(message.bytes, [0x08, 0x96, 0x01]);
        let mut message = Message::default();
        message.bytes(2, b"testing");
        assert_eq!(message.bytes, [0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67]);
        let mut inner = Message::default();
        inner.number(1, 150);
        let mut message = Message::default();
        message.message(3, &inner);
        assert_eq!(message.bytes, [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let mut message = Message::default();
        message.packed(6, [3, 270, 86_942]);
        assert_eq!(message.into_bytes(), [0x32, 0x06, 0x03, 0x8e, 0x02, 0x9e, 0xa7, 0x05]);
    }

    #[test]
    fn zeros_are_left_out_alone_and_kept_in_lists() {
        let mut message = Message::default();
        message.number(1, 0).bytes(6, b"").packed(2, [0, 0]);
        assert_eq!(message.bytes, [0x32, 0, 0x12, 2, 0, 0]);
    }
}
