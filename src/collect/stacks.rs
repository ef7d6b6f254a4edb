//! The stacks of a recording as they are told apart while it runs: by frames, allocator domain and thread. Fed with its traces; each
//! stack carries what its owner keeps of it.
//!
//! Memory is bounded: so many stacks, and the others are one together, under a name that says so.

use super::names::NOT_KEPT;
use super::tree::{NamedFrame, StackNode, Tree};
use crate::profile::model::StackFrame;
use crate::profile::sidecar::DOMAIN_UNKNOWN;
use std::borrow::Cow;
use std::collections::HashMap;

/// The stack of all that are not told apart.
pub const REST: u32 = 0;

/// What a stack is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// Its frames.
    pub node: StackNode,
    /// Allocator domain.
    pub domain: u8,
    /// Number of the thread; 0 is one that is not known, or not kept apart.
    pub thread: u32,
}

/// A trace of the recording.
#[derive(Debug, Clone, Copy)]
struct Traced {
    /// `None` when the tree is full.
    node: Option<StackNode>,
    /// Its stack, from its first allocation on: that tells thread and domain.
    stack: Option<u32>,
}

/// Stacks with a `T` each, numbered as they come.
#[derive(Debug)]
pub struct Stacks<T> {
    tree: Tree,
    stacks: Vec<(Key, T)>,
    by_key: HashMap<Key, u32>,
    /// By trace index - 1.
    traces: Vec<Traced>,
    most: usize,
    most_apart: usize,
}

impl<T> Stacks<T> {
    /// At most `most` stacks, from `most_apart` on not told apart by thread; `new` makes what [`REST`] carries.
    pub fn new(most: usize, most_apart: usize, new: impl FnOnce(&NamedFrame) -> T) -> Self {
        let rest = NamedFrame {
            file: NOT_KEPT.into(),
            line: 0,
            function: NOT_KEPT.into(),
        };
        let mut tree = Tree::default();
        let node = tree.insert(std::slice::from_ref(&rest)).unwrap_or_default();
        let key = Key {
            node,
            domain: DOMAIN_UNKNOWN,
            thread: 0,
        };
        Self {
            tree,
            stacks: vec![(key, new(&rest))],
            by_key: HashMap::from([(key, REST)]),
            traces: Vec::new(),
            most,
            most_apart,
        }
    }

    /// The next trace has these frames, the innermost first.
    pub fn trace(&mut self, frames: &[NamedFrame]) {
        let node = self.tree.insert(frames);
        self.traces.push(Traced { node, stack: None });
    }

    /// Traces are numbered anew from here on; stacks stay.
    pub fn forget_traces(&mut self) {
        self.traces.clear();
    }

    /// The stack that a trace allocates for. `new` makes what it carries if it is a new one, from what it is of and its allocating line.
    pub fn allocating(&mut self, trace: u32, domain: u8, thread: u32, new: impl FnOnce(&Key, &NamedFrame) -> T) -> u32 {
        let place = (trace as usize).wrapping_sub(1);
        match self.traces.get(place) {
            None | Some(Traced { node: None, .. }) => REST,
            Some(Traced { stack: Some(known), .. }) => *known,
            Some(&Traced {
                node: Some(node),
                stack: None,
            }) => {
                let stack = self.stack(Key { node, domain, thread }, new);
                self.traces[place].stack = Some(stack);
                stack
            }
        }
    }

    fn stack(&mut self, mut key: Key, new: impl FnOnce(&Key, &NamedFrame) -> T) -> u32 {
        if let Some(&known) = self.by_key.get(&key) {
            return known;
        }
        if self.stacks.len() >= self.most_apart {
            key.thread = 0;
            if let Some(&known) = self.by_key.get(&key) {
                return known;
            }
        }
        match self.tree.frames(key.node).next() {
            Some(leaf) if self.stacks.len() < self.most => {
                let number = self.stacks.len() as u32;
                self.stacks.push((key, new(&key, leaf)));
                self.by_key.insert(key, number);
                number
            }
            _ => REST,
        }
    }

    /// The stack that a trace has allocated for.
    #[must_use]
    pub fn of(&self, trace: u32) -> u32 {
        let place = (trace as usize).checked_sub(1);
        place.and_then(|place| self.traces.get(place)?.stack).unwrap_or(REST)
    }

    /// Traces with the stacks that they count for.
    pub fn traces(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let numbered = (1..).zip(&self.traces);
        numbered.map(|(trace, traced): (u32, _)| (trace, traced.stack.unwrap_or(REST)))
    }

    /// Stack number `number`.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&(Key, T)> {
        self.stacks.get(number as usize)
    }

    /// What it carries.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.stacks.get_mut(number as usize).map(|(_, carried)| carried)
    }

    /// All of them, by number.
    pub fn iter(&self) -> impl Iterator<Item = &(Key, T)> {
        self.stacks.iter()
    }

    /// What all of them carry.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.stacks.iter_mut().map(|(_, carried)| carried)
    }

    /// The frames of a stack, the innermost first.
    pub fn frames(&self, number: u32) -> impl Iterator<Item = &NamedFrame> {
        let node = self.get(number).map(|(key, _)| key.node);
        self.tree.frames(node.unwrap_or_default())
    }

    /// The same as reports take them, the outermost first.
    #[must_use]
    pub fn stack_frames<'a>(&'a self, number: u32) -> Vec<StackFrame<'a>> {
        let frame = |frame: &'a NamedFrame| StackFrame {
            file: Cow::Borrowed(&*frame.file),
            line: frame.line,
            function: Some(&*frame.function),
        };
        let mut frames: Vec<_> = self.frames(number).map(frame).collect();
        frames.reverse();
        frames
    }
}
