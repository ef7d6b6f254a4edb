//! Instructions, as far as the stubs need them. Encodings: Arm Architecture Reference Manual (DDI 0487), C6.2 and C7.2; the
//! listing that `stub.rs` is compared with was made by another's disassembler.

use super::LONGEST_STUB;

/// A general register, by its number; 31 is `sp` or zero, as the instruction has it.
pub(super) type X = u32;

/// A stub in the making, on the stack: no allocation, since it is made between fork and exit.
pub(super) struct Code {
    bytes: [u8; LONGEST_STUB],
    len: usize,
}

/// A branch whose target is not known yet.
#[derive(Clone, Copy)]
pub(super) struct Branch {
    at: usize,
    instruction: u32,
    bits: u32,
    shift: u32,
}

impl Code {
    /// Filled with `brk #0`.
    pub(super) fn new() -> Self {
        let mut bytes = [0; LONGEST_STUB];
        let (words, _) = bytes.as_chunks_mut::<4>();
        words.fill(0xd420_0000_u32.to_le_bytes());
        Self { bytes, len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn bytes(&self) -> [u8; LONGEST_STUB] {
        self.bytes
    }

    /// One that is too long is refused in the end.
    fn put_bytes(&mut self, bytes: &[u8]) {
        if let Some(place) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            place.copy_from_slice(bytes);
        }
        self.len += bytes.len();
    }

    fn put(&mut self, instruction: u32) {
        self.put_bytes(&instruction.to_le_bytes());
    }

    /// A word of data.
    pub(super) fn word(&mut self, value: u64) {
        self.put_bytes(&value.to_le_bytes());
    }

    fn branch(&mut self, instruction: u32, bits: u32, shift: u32) -> Branch {
        self.put(instruction);
        Branch {
            at: self.len - 4,
            instruction,
            bits,
            shift,
        }
    }

    /// The branch comes here.
    pub(super) fn land(&mut self, branch: Branch) {
        let distance = (self.len - branch.at) as u32 / 4;
        debug_assert!(distance < 1 << (branch.bits - 1));
        let whole = branch.instruction | distance << branch.shift;
        if let Some(place) = self.bytes.get_mut(branch.at..branch.at + 4) {
            place.copy_from_slice(&whole.to_le_bytes());
        }
    }

    /// `udf #0`: no instruction.
    pub(super) fn undefined(&mut self) {
        self.put(0);
    }

    /// `b`
    pub(super) fn b(&mut self) -> Branch {
        self.branch(0x1400_0000, 26, 0)
    }

    /// `b` to what lies `distance` bytes from the stub's first one, see [`in_reach`].
    pub(super) fn b_to(&mut self, distance: i64) {
        let words = (distance - self.len as i64) / 4;
        self.put(0x1400_0000 | (words as u32 & 0x03ff_ffff));
    }

    /// `b.ne`
    pub(super) fn b_ne(&mut self) -> Branch {
        self.branch(0x5400_0001, 19, 5)
    }

    /// `cbz`
    pub(super) fn cbz(&mut self, x: X) -> Branch {
        self.branch(0xb400_0000 | x, 19, 5)
    }

    /// `cbnz`
    pub(super) fn cbnz(&mut self, x: X) -> Branch {
        self.branch(0xb500_0000 | x, 19, 5)
    }

    /// `tbnz x, #63`: negative.
    pub(super) fn if_negative(&mut self, x: X) -> Branch {
        self.branch(0xb7f8_0000 | x, 14, 5)
    }

    /// `mov to, from`
    pub(super) fn mov(&mut self, to: X, from: X) {
        self.put(0xaa00_03e0 | from << 16 | to);
    }

    /// `mov to, #value` in one instruction or two.
    pub(super) fn set(&mut self, to: X, value: u32) {
        self.put(0xd280_0000 | (value & 0xffff) << 5 | to);
        if value >> 16 != 0 {
            self.put(0xf2a0_0000 | (value >> 16) << 5 | to);
        }
    }

    /// `mov to, #-(value + 1)`
    pub(super) fn set_not(&mut self, to: X, value: u32) {
        self.put(0x9280_0000 | value << 5 | to);
    }

    /// `adr to, offset`, from the stub's first byte.
    pub(super) fn adr(&mut self, to: X, offset: usize) {
        let distance = (offset as i64 - self.len as i64) as u32;
        self.put(0x1000_0000 | (distance & 3) << 29 | (distance >> 2 & 0x7_ffff) << 5 | to);
    }

    /// `ldr to, [base, #offset]`
    pub(super) fn ldr(&mut self, to: X, base: X, offset: u32) {
        self.put(0xf940_0000 | (offset / 8) << 10 | base << 5 | to);
    }

    /// `str from, [base, #offset]`
    pub(super) fn str(&mut self, from: X, base: X, offset: u32) {
        self.put(0xf900_0000 | (offset / 8) << 10 | base << 5 | from);
    }

    /// `stlr from, [base]`: whoever sees it sees what was stored before.
    pub(super) fn stlr(&mut self, from: X, base: X) {
        self.put(0xc89f_fc00 | base << 5 | from);
    }

    /// `ldp to, to + 1, [base, #offset]`
    pub(super) fn ldp(&mut self, to: X, base: X, offset: u32) {
        self.pair(0xa940_0000, to, to + 1, base, offset / 8);
    }

    /// The offset is in units of the registers' size, and signed.
    fn pair(&mut self, instruction: u32, first: u32, second: u32, base: X, offset: u32) {
        debug_assert!(offset < 1 << 6);
        self.put(instruction | offset << 15 | second << 10 | base << 5 | first);
    }

    /// Stores or loads, by way of `x9` and `x10`, `fpsr` and `fpcr` at `base`, and behind them `q0` to `q31`.
    pub(super) fn floating(&mut self, base: X, load: bool) {
        const FPSR: u32 = 0x4420;
        const FPCR: u32 = 0x4400;
        let (mrs, msr) = (0xd53b_0000, 0xd51b_0000);
        if load {
            self.pair(0xa940_0000, 9, 10, base, 0);
            self.put(msr | FPSR | 9);
            self.put(msr | FPCR | 10);
        } else {
            self.put(mrs | FPSR | 9);
            self.put(mrs | FPCR | 10);
            self.pair(0xa900_0000, 9, 10, base, 0);
        }
        let instruction = if load { 0xad40_0000 } else { 0xad00_0000 };
        for number in (0..32).step_by(2) {
            self.pair(instruction, number, number + 1, base, number + 1);
        }
    }

    /// `msr nzcv, from`
    pub(super) fn set_flags(&mut self, from: X) {
        self.put(0xd51b_4200 | from);
    }

    /// `mov sp, from`
    pub(super) fn set_sp(&mut self, from: X) {
        self.put(0x9100_001f | from << 5);
    }

    /// `sub to, sp, #bytes`
    pub(super) fn below_sp(&mut self, to: X, bytes: u32) {
        self.put(0xd100_03e0 | bytes << 10 | to);
    }

    /// `cmp one, other`
    pub(super) fn cmp(&mut self, one: X, other: X) {
        self.put(0xeb00_001f | other << 16 | one << 5);
    }

    /// `cmn one, #value; cset to, eq`: 1 if `one` is `-value`.
    pub(super) fn set_if_minus(&mut self, to: X, one: X, value: u32) {
        self.put(0xb100_001f | value << 10 | one << 5);
        self.put(0x9a9f_17e0 | to);
    }

    /// `and to, to, other`
    pub(super) fn and(&mut self, to: X, other: X) {
        self.put(0x8a00_0000 | other << 16 | to << 5 | to);
    }

    /// `neg to, to`
    pub(super) fn neg(&mut self, to: X) {
        self.put(0xcb00_03e0 | to << 16 | to);
    }

    /// `blr to`
    pub(super) fn blr(&mut self, to: X) {
        self.put(0xd63f_0000 | to << 5);
    }

    /// `mov x8, #number; svc #0`. The kernel changes no register but `x0`.
    pub(super) fn call(&mut self, number: u64) {
        self.set(8, number as u32);
        self.put(0xd400_0001);
    }
}

/// True if a `b` anywhere in a stub at `stub` can go to `pc`: it has 26 bits, of words.
pub(super) const fn in_reach(stub: u64, pc: u64) -> bool {
    const REACH: u64 = (1 << 27) - LONGEST_STUB as u64 - 4;
    stub.abs_diff(pc) < REACH && pc.is_multiple_of(4) && stub.is_multiple_of(4)
}
