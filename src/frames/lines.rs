//! From an instruction to its line: the three generations of CPython's line tables.
//!
//! | Python | member | entry |
//! |---|---|---|
//! | 3.7 to 3.9 | `co_lnotab` | byte step, signed line step |
//! | 3.10 | `co_linetable` | bytes in the range, signed line step, -128: no line |
//! | 3.11 and later | `co_linetable` | first byte: bit 7 set, kind, code units; then varints, columns skipped |
//!
//! Worked example, 3.12, first line 1: `80 00 | d8 08 09 | dc 08 09 | f3 03 01 09 0d`. `80`: kind 0, one code unit, no
//! step: unit 0 is line 1. `d8`: kind 11, one unit, one line on: unit 1 is line 2. `dc`: the same for five units: 2 to
//! 6 are line 3. `f3`: kind 14, four units, the step is the varint `03`, that is -1: units 7 to 10 are line 2.
//!
//! A table is bytes from the target: whatever they are, decoding ends after one pass and never fails; at worst the
//! answer is [`FrameLine::OutOfRange`].

/// What the raw instruction number of a frame means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstrUnit {
    /// 3.7 to 3.9: `f_lasti` in bytes.
    LastiBytes,
    /// 3.10: `f_lasti` in code units of two bytes.
    LastiUnits,
    /// From 3.11: bytes between the code object's `co_code_adaptive` and `prev_instr` or `instr_ptr`.
    ByteDistance,
}

impl InstrUnit {
    /// What Python 3.`minor` uses.
    #[must_use]
    pub const fn of_minor(minor: u8) -> Self {
        match minor {
            ..=9 => Self::LastiBytes,
            10 => Self::LastiUnits,
            _ => Self::ByteDistance,
        }
    }

    /// The offset in bytes from the first instruction; `None` when the frame has not started.
    #[must_use]
    pub fn bytes(self, raw_instr: i32) -> Option<u64> {
        let raw = u64::try_from(raw_instr).ok()?;
        Some(match self {
            Self::LastiBytes | Self::ByteDistance => raw,
            Self::LastiUnits => raw * 2,
        })
    }
}

/// The line of an instruction, or why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameLine {
    /// This line.
    Line(u32),
    /// The table says that this instruction belongs to no line.
    NoLine,
    /// The frame has not executed anything yet.
    NotStarted,
    /// The table does not reach so far (it is damaged or was cut).
    OutOfRange,
}

impl FrameLine {
    /// The line, or `fallback`.
    #[must_use]
    pub const fn or(self, fallback: u32) -> u32 {
        match self {
            Self::Line(line) => line,
            Self::NoLine | Self::NotStarted | Self::OutOfRange => fallback,
        }
    }
}

/// A code object's line table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineTable {
    unit: InstrUnit,
    first_line: u32,
    bytes: Vec<u8>,
}

/// A line while steps are added to it.
#[derive(Clone, Copy)]
struct RunningLine(i64);

impl RunningLine {
    fn step(&mut self, by: i64) {
        self.0 = self.0.saturating_add(by);
    }

    fn get(self) -> FrameLine {
        u32::try_from(self.0).map_or(FrameLine::OutOfRange, FrameLine::Line)
    }
}

impl LineTable {
    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Gives its memory back: from now on no instruction has a line of its own.
    pub fn clear(&mut self) {
        self.bytes = Vec::new();
    }

    /// `bytes` are the table of a code object that begins at `first_line`.
    #[must_use]
    pub const fn new(unit: InstrUnit, first_line: u32, bytes: Vec<u8>) -> Self {
        Self {
            unit,
            first_line,
            bytes,
        }
    }

    /// The line of the instruction with the raw number `raw_instr`, in the unit of this table's Python version.
    #[must_use]
    pub fn line_of(&self, raw_instr: i32) -> FrameLine {
        let Some(at) = self.unit.bytes(raw_instr) else {
            return FrameLine::NotStarted;
        };
        match self.unit {
            InstrUnit::LastiBytes => self.line_by_lnotab(at),
            InstrUnit::LastiUnits => self.line_by_ranges(at),
            InstrUnit::ByteDistance => self.line_by_locations(at / 2),
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (u8, i8)> + '_ {
        self.bytes.chunks_exact(2).filter_map(|pair| match *pair {
            [bytes, line] => Some((bytes, i8::from_ne_bytes([line]))),
            _ => None,
        })
    }

    fn line_by_lnotab(&self, wanted: u64) -> FrameLine {
        let mut at = 0_u64;
        let mut line = RunningLine(i64::from(self.first_line));
        for (bytes, step) in self.pairs() {
            at += u64::from(bytes);
            if at > wanted {
                break;
            }
            line.step(i64::from(step));
        }
        line.get()
    }

    fn line_by_ranges(&self, wanted: u64) -> FrameLine {
        let mut end = 0_u64;
        let mut line = RunningLine(i64::from(self.first_line));
        for (bytes, step) in self.pairs() {
            let no_line = step == i8::MIN;
            if !no_line {
                line.step(i64::from(step));
            }
            end += u64::from(bytes);
            if wanted < end {
                return if no_line { FrameLine::NoLine } else { line.get() };
            }
        }
        FrameLine::OutOfRange
    }

    fn line_by_locations(&self, wanted_unit: u64) -> FrameLine {
        const NO_LINE: u8 = 15;
        let mut end = 0_u64;
        let mut line = RunningLine(i64::from(self.first_line));
        let mut rest = self.bytes.as_slice();
        while let Some((&first, mut after)) = rest.split_first() {
            let kind = first >> 3 & 15;
            match kind {
                10..=12 => line.step(i64::from(kind) - 10),
                13 | 14 => line.step(signed_varint(&mut after)),
                _ => {}
            }
            end += u64::from(first & 7) + 1;
            if wanted_unit < end {
                return if kind == NO_LINE { FrameLine::NoLine } else { line.get() };
            }
            // Columns: everything up to the next byte with bit 7.
            let columns = after.iter().take_while(|byte| **byte & 0x80 == 0).count();
            rest = after.get(columns..).unwrap_or_default();
        }
        FrameLine::OutOfRange
    }
}

/// Six bits a byte, lowest first, bit 6: another byte follows. The lowest bit of the number is the sign.
fn signed_varint(bytes: &mut &[u8]) -> i64 {
    let mut value = 0_u64;
    let mut shift = 0_u32;
    while let Some((&byte, rest)) = bytes.split_first() {
        if byte & 0x80 != 0 {
            break; // The next entry: this one is cut short.
        }
        *bytes = rest;
        // Bits beyond 60 can only be garbage; they are read over.
        if shift < 60 {
            value |= u64::from(byte & 63) << shift;
        }
        shift = shift.saturating_add(6);
        if byte & 64 == 0 {
            break;
        }
    }
    let size = i64::try_from(value >> 1).unwrap_or(i64::MAX);
    if value & 1 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(unit: InstrUnit, bytes: &[u8]) -> LineTable {
        LineTable::new(unit, 1, bytes.to_vec())
    }

    #[test]
    fn lnotab() {
        let table = table(InstrUnit::LastiBytes, &[0, 1, 4, 1, 4, 1, 2, 0xff, 4, 0x7f, 0, 0x4b]);
        let expected = [(0, 2), (4, 3), (8, 4), (10, 3), (12, 3), (14, 205)];
        for (at, line) in expected {
            assert_eq!(table.line_of(at), FrameLine::Line(line), "{at}");
        }
        assert_eq!(table.line_of(-1), FrameLine::NotStarted);
    }

    #[test]
    fn ranges_of_3_10() {
        let table = table(
            InstrUnit::LastiUnits,
            &[4, 1, 4, 1, 2, 1, 4, 0xff, 0, 0x7f, 4, 0x4b, 2, 0x80],
        );
        let expected = [(0, 2), (2, 3), (4, 4), (5, 3), (6, 3), (7, 205)];
        for (unit, line) in expected {
            assert_eq!(table.line_of(unit), FrameLine::Line(line), "{unit}");
        }
        assert_eq!(table.line_of(9), FrameLine::NoLine);
        assert_eq!(table.line_of(10), FrameLine::OutOfRange);
    }

    #[test]
    fn locations_of_3_11() {
        let bytes = [
            0x80, 0x00, 0xd8, 0x08, 0x09, 0x80, 0x41, 0xdc, 0x08, 0x09, 0x88, 0x21, 0xd8, 0x0a, 0x0b, 0xf3, 0x03, 0x01,
            0x09, 0x0d, 0x80, 0x41, 0xf0, 0x54, 0x06, 0x00, 0x0c, 0x0d, 0x80, 0x48,
        ];
        let table = table(InstrUnit::ByteDistance, &bytes);
        let lines: Vec<_> = (0..17).map(|unit| table.line_of(unit * 2).or(0)).collect();
        assert_eq!(lines, [1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 3, 3, 3, 3, 3, 205, 205]);
        assert_eq!(table.line_of(34), FrameLine::OutOfRange);
        assert_eq!(table.line_of(-2), FrameLine::NotStarted);
    }

    #[test]
    fn garbage_ends() {
        // Every byte repeated, and every pair of bytes: decoding ends with some answer.
        for unit in [InstrUnit::LastiBytes, InstrUnit::LastiUnits, InstrUnit::ByteDistance] {
            for byte in 0..=255_u8 {
                for second in 0..=255_u8 {
                    let table = table(unit, &[byte, second, byte, byte, second]);
                    let _ = table.line_of(i32::MAX);
                    let _ = table.line_of(4);
                }
            }
        }
        let endless = table(InstrUnit::ByteDistance, &[&[0xf0][..], &[0x7f; 4096]].concat());
        let _ = endless.line_of(0);
    }
}
