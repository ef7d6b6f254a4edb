//! Names and lines of code objects, read from outside, against what the interpreter itself says: every instruction of
//! a good part of the standard library, on every interpreter that is there.

use crate::common::interpreters::{self, Python};
use crate::common::python::Running;
use pyheap::attach::interpreter;
use pyheap::frames::{BlobMemory, CodeInfo, FrameLine, Layout};
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};

/// So many modules of the standard library are taken, spread evenly; `PYHEAP_TEST_MODULES` says otherwise. (700 take
/// some minutes.)
const MODULES: &str = "100";

/// What Python says of one code object.
struct Expected {
    address: RemoteAddr,
    first_line: u32,
    name: String,
    qualname: Option<String>,
    filename: String,
    ranges: Vec<(i32, i32, FrameLine)>,
}

fn unhex(hex: &str) -> String {
    if hex == "''" {
        return String::new();
    }
    let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
    String::from_utf8((0..hex.len()).step_by(2).map(byte).collect()).unwrap()
}

fn parse(line: &str) -> Expected {
    let fields: Vec<&str> = line.split(' ').collect();
    assert_eq!(fields[0], "code", "{line}");
    let range = |field: &&str| {
        let parts: Vec<&str> = field.split(':').collect();
        let line = match parts[2] {
            "-" => FrameLine::NoLine,
            line => FrameLine::Line(line.parse().unwrap()),
        };
        (parts[0].parse().unwrap(), parts[1].parse().unwrap(), line)
    };
    Expected {
        address: RemoteAddr(fields[1].parse().unwrap()),
        first_line: fields[2].parse().unwrap(),
        name: unhex(fields[3]),
        qualname: (fields[4] != "-").then(|| unhex(fields[4])),
        filename: unhex(fields[5]),
        ranges: fields[6..].iter().map(range).collect(),
    }
}

/// Checks one code object; gives the number of instructions.
fn check(info: &CodeInfo, expected: &Expected, python: &Python) -> usize {
    let at = format!("{} {} in {}", python.path.display(), expected.name, expected.filename);
    assert_eq!(info.name, expected.name, "{at}");
    assert_eq!(info.qualname, expected.qualname, "{at}");
    assert_eq!(info.filename, expected.filename, "{at}");
    assert_eq!(info.first_line, expected.first_line, "{at}");
    assert!(!info.line_table_cut, "{at}");
    assert_eq!(info.line_of(-1), FrameLine::NotStarted, "{at}");
    let mut instructions = 0;
    // Tables of generated data have thousands of ranges, and each lookup goes through all before it.
    let step = expected.ranges.len() / 1000 + 1;
    for &(start, end, line) in expected.ranges.iter().step_by(step) {
        for byte in (start..end).step_by(2) {
            let raw = if python.minor() == 10 { byte / 2 } else { byte };
            assert_eq!(info.line_of(raw), line, "{at}, byte {byte}");
            instructions += 1;
        }
    }
    instructions
}

#[test]
fn every_instruction_of_the_standard_library_has_pythons_own_line() {
    // One thread an interpreter: most of the time goes into Python's compiler.
    std::thread::scope(|scope| {
        for python in interpreters::supported() {
            scope.spawn(move || check_library(&python));
        }
    });
}

fn check_library(python: &Python) {
    let modules = std::env::var("PYHEAP_TEST_MODULES").unwrap_or_else(|_| MODULES.to_owned());
    let mut target = Running::start(python, "code_lines.py", &[&modules]);
    let lines = target.lines_until("ready");
    let found = interpreter::find(target.pid()).unwrap();
    let mem = ProcessMemory::new(target.pid());
    let mut instructions = 0;
    for line in &lines {
        let expected = parse(line);
        let info = CodeInfo::read(&mem, expected.address, &found.layout)
            .unwrap_or_else(|e| panic!("{} {}: {e}", python.path.display(), expected.name));
        instructions += check(&info, &expected, python);
        let copied = read_from_a_copy(&mem, expected.address, &found.layout);
        assert_eq!(copied, info, "{}", python.path.display());
    }
    eprintln!(
        "{}: {} code objects, {instructions} instructions",
        python.path.display(),
        lines.len()
    );
    let enough = std::env::var_os("PYHEAP_TEST_MODULES").is_some() || lines.len() > 1000 && instructions > 50_000;
    assert!(enough, "{}", python.path.display());
}

/// Copies what a shim copies, by offsets alone, and reads the code object from that.
fn read_from_a_copy(mem: &ProcessMemory, address: RemoteAddr, layout: &Layout) -> CodeInfo {
    let code = &layout.code;
    let len = usize::try_from(code.prefix_len()).unwrap();
    let mut parts = vec![(address, mem.read_vec(address, len).unwrap())];
    let pointer = |offset: u64| mem.read_ptr(address.checked_add(offset).unwrap()).unwrap();
    for offset in [Some(code.filename), Some(code.name), code.qualname]
        .into_iter()
        .flatten()
    {
        let string = pointer(offset);
        let state = mem.read_u32(string.checked_add(layout.unicode.state).unwrap()).unwrap();
        let length = mem
            .read_u64(string.checked_add(layout.unicode.length).unwrap())
            .unwrap();
        let bits = state >> layout.unicode.kind_bit;
        let (kind, compact, ascii) = (bits & 7, bits >> 3 & 1 == 1, bits >> 4 & 1 == 1);
        let header = if compact && ascii {
            layout.unicode.ascii_data
        } else {
            layout.unicode.compact_data
        };
        let data = usize::try_from(length * u64::from(kind)).unwrap();
        if compact {
            let all = usize::try_from(header).unwrap() + data;
            parts.push((string, mem.read_vec(string, all).unwrap()));
        } else {
            let pointer_at = layout.unicode.data_pointer;
            parts.push((
                string,
                mem.read_vec(string, usize::try_from(pointer_at).unwrap() + 8).unwrap(),
            ));
            let at = mem.read_ptr(string.checked_add(pointer_at).unwrap()).unwrap();
            parts.push((at, mem.read_vec(at, data).unwrap()));
        }
    }
    let table = pointer(code.line_table);
    let size = mem.read_u64(table.checked_add(layout.bytes.size).unwrap()).unwrap();
    let all = usize::try_from(layout.bytes.data + size).unwrap();
    parts.push((table, mem.read_vec(table, all).unwrap()));

    let mut blob = BlobMemory::new();
    for (address, bytes) in &parts {
        blob.push(*address, bytes).unwrap();
    }
    CodeInfo::read(&blob, address, layout).unwrap()
}
