//! Names, frames and stacks, each once, within a bound.

use std::collections::HashMap;

use super::series::put;
use crate::profile::model::StackFrame;
use crate::report::human::clean;

/// Names longer than this many letters lose their middle.
const MAX_NAME: usize = 300;
/// Bytes that a frame takes beside its names, about.
const FRAME_BYTES: usize = 16;
/// The frame of the root.
pub const ALL: u32 = 0;
/// The frame of what has no stack.
pub const UNKNOWN: u32 = 1;
/// The frame in the place of callers that are left out.
pub const LEFT_OUT: u32 = 2;
/// The frame of what has neither callers nor a line of its own here.
pub const REST: u32 = 3;

/// What there is room for.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Places in the tree.
    pub nodes: usize,
    /// Bytes of names and frames, as they are written.
    pub name_bytes: usize,
}

/// A name as it is shown: without anything that a browser obeys, and not too long.
pub fn shown(name: &str) -> String {
    let name = clean(name);
    let length = name.chars().count();
    if length <= MAX_NAME {
        return name.into_owned();
    }
    let first = name.chars().take(MAX_NAME / 3);
    let last = name.chars().skip(length - 2 * MAX_NAME / 3);
    first.chain(['…']).chain(last).collect()
}

/// Numbers of a frame's names and its line; function 0 is none.
type Frame = (u32, u32, u32);

/// All stacks as one tree, callers first.
#[derive(Debug)]
pub struct Stacks {
    room: Room,
    /// Names by number; 0 is empty.
    pub names: Vec<String>,
    name_numbers: HashMap<String, u32>,
    name_bytes: usize,
    /// File, line and function; the first four are named by the page.
    pub frames: Vec<Frame>,
    frame_numbers: HashMap<Frame, u32>,
    /// Parent and frame; the root is its own parent.
    nodes: Vec<(u32, u32)>,
    children: HashMap<(u32, u32), u32>,
}

impl Stacks {
    /// No stack yet.
    pub fn new(room: Room) -> Self {
        Self {
            room,
            names: vec![String::new()],
            name_numbers: HashMap::from([(String::new(), 0)]),
            name_bytes: 0,
            frames: vec![(0, 0, 0); 4],
            frame_numbers: HashMap::new(),
            nodes: vec![(0, ALL)],
            children: HashMap::new(),
        }
    }

    /// Changes what there is room for.
    pub fn set_room(&mut self, room: Room) {
        self.room = room;
    }

    /// The place of one of the frames that have no name, below the root.
    pub fn special(&mut self, frame: u32) -> u32 {
        self.child(0, frame)
    }

    /// The place of a stack, outermost frame first, below `start`; `None` if there is no room for it.
    pub fn insert(&mut self, start: u32, frames: &[StackFrame<'_>]) -> Option<u32> {
        if self.nodes.len() + frames.len() > self.room.nodes {
            // Perhaps most of it is there already.
            let known = self.walk(start, frames)?;
            return Some(known);
        }
        let mut node = start;
        for frame in frames {
            let frame = self.frame(frame)?;
            node = self.child(node, frame);
        }
        Some(node)
    }

    fn walk(&self, start: u32, frames: &[StackFrame<'_>]) -> Option<u32> {
        frames.iter().try_fold(start, |node, frame| {
            let name = |name: &str| self.name_numbers.get(&shown(name)).copied();
            let function = frame.function.map_or(Some(0), name)?;
            let frame = self.frame_numbers.get(&(name(&frame.file)?, frame.line, function))?;
            self.children.get(&(node, *frame)).copied()
        })
    }

    fn child(&mut self, node: u32, frame: u32) -> u32 {
        let next = self.nodes.len() as u32;
        let found = *self.children.entry((node, frame)).or_insert(next);
        if found == next {
            self.nodes.push((node, frame));
        }
        found
    }

    fn frame(&mut self, frame: &StackFrame<'_>) -> Option<u32> {
        let file = self.name(&frame.file)?;
        let function = match frame.function {
            Some(function) => self.name(function)?,
            None => 0,
        };
        let key = (file, frame.line, function);
        if let Some(number) = self.frame_numbers.get(&key) {
            return Some(*number);
        }
        if self.name_bytes + FRAME_BYTES > self.room.name_bytes {
            return None;
        }
        self.name_bytes += FRAME_BYTES;
        let number = self.frames.len() as u32;
        self.frames.push(key);
        self.frame_numbers.insert(key, number);
        Some(number)
    }

    /// The number of a name; `None` if there is no room for it.
    pub fn name(&mut self, name: &str) -> Option<u32> {
        let name = shown(name);
        if let Some(number) = self.name_numbers.get(&name) {
            return Some(*number);
        }
        let length = written(&name);
        if self.name_bytes + length > self.room.name_bytes {
            return None;
        }
        self.name_bytes += length;
        let number = self.names.len() as u32;
        self.names.push(name.clone());
        self.name_numbers.insert(name, number);
        Some(number)
    }

    /// The number of places.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Appends the number of places, and for each after the root how far it is from its parent, and its frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.nodes.len() as u64);
        for (place, (parent, frame)) in self.nodes.iter().enumerate().skip(1) {
            put(out, place as u64 - u64::from(*parent));
            put(out, u64::from(*frame));
        }
    }
}

/// Bytes that a name takes in JSON, where `<`, `>` and `&` are escaped.
pub(super) fn written(name: &str) -> usize {
    let of = |byte| match byte {
        b'<' | b'>' | b'&' => 6,
        b'"' | b'\\' => 2,
        _ => 1,
    };
    name.bytes().map(of).sum::<usize>() + 3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(file: &str, line: u32) -> StackFrame<'_> {
        StackFrame {
            file: file.into(),
            line,
            function: Some("f"),
        }
    }

    #[test]
    fn equal_beginnings_are_one() {
        let mut stacks = Stacks::new(Room {
            nodes: 5,
            name_bytes: 100,
        });
        let first = stacks.insert(0, &[frame("a.py", 1), frame("a.py", 2)]).unwrap();
        let second = stacks.insert(0, &[frame("a.py", 1), frame("a.py", 3)]).unwrap();
        assert_eq!((first, second, stacks.node_count(), stacks.frames.len()), (2, 3, 4, 7));
        assert_eq!(stacks.insert(0, &[frame("a.py", 9), frame("a.py", 2)]), None, "no room");
        assert_eq!(stacks.insert(0, &[frame("a.py", 1), frame("a.py", 2)]), Some(first));
        let mut out = Vec::new();
        stacks.encode(&mut out);
        assert_eq!(out, [4, 1, 4, 1, 5, 2, 6]);
    }

    #[test]
    fn names_are_bounded() {
        let mut stacks = Stacks::new(Room {
            nodes: 100,
            name_bytes: 30,
        });
        assert_eq!(stacks.name("<&>"), Some(1));
        assert_eq!(stacks.name("1234567"), None);
        assert_eq!((stacks.name("<&>"), stacks.name("")), (Some(1), Some(0)));
        let long = "x".repeat(500) + "/end.py";
        let name = shown(&long);
        assert!(name.chars().count() <= 301 && name.ends_with("/end.py") && name.contains('…'));
        assert_eq!(shown("a\u{202E}b\n"), "a\\u{202e}b\\n");
    }
}
