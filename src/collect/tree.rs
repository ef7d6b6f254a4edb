//! Stacks as a tree, so that what they have in common is kept once.
//!
//! A recording meets stacks by the million when code is generated or recursion is deep. A stack is the node of its
//! innermost frame; its callers are the node's ancestors:
//!
//! ```text
//! main ─ serve ─ handle ─ parse      node 4: one new node for a stack of four frames
//!                      └─ render     node 5
//! ```

use std::collections::HashMap;
use std::sync::Arc;

/// Most nodes that are kept, some 30 bytes each: what a hash table of 2^21 places holds.
const MAX_NODES: usize = 7 << 18;
/// Most different frames that are kept, some 130 bytes each.
const MAX_FRAMES: usize = 7 << 15;

/// A frame with names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NamedFrame {
    /// File name as Python has it; of the form `<…>` where there is no file.
    pub file: Arc<str>,
    /// Line, 0 if there is none.
    pub line: u32,
    /// Qualified name from 3.11 on, else the name.
    pub function: Arc<str>,
}

/// A stack: the number of its innermost frame's node. 0 is the empty stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct StackNode(u32);

/// All stacks met so far.
#[derive(Debug, Default)]
pub struct Tree {
    /// Parent and frame of each node, from node 1 on.
    nodes: Vec<(u32, u32)>,
    children: HashMap<(u32, u32), u32>,
    frames: Vec<NamedFrame>,
    numbers: HashMap<NamedFrame, u32>,
}

impl Tree {
    /// The stack of these frames, innermost first; `None` when the tree is full.
    pub fn insert(&mut self, innermost_first: &[NamedFrame]) -> Option<StackNode> {
        let mut node = 0;
        for frame in innermost_first.iter().rev() {
            let frame = self.number(frame)?;
            node = match self.children.get(&(node, frame)) {
                Some(&child) => child,
                None if self.nodes.len() >= MAX_NODES => return None,
                None => {
                    self.nodes.push((node, frame));
                    let child = u32::try_from(self.nodes.len()).ok()?;
                    self.children.insert((node, frame), child);
                    child
                }
            };
        }
        Some(StackNode(node))
    }

    fn number(&mut self, frame: &NamedFrame) -> Option<u32> {
        if let Some(&known) = self.numbers.get(frame) {
            return Some(known);
        }
        if self.frames.len() >= MAX_FRAMES {
            return None;
        }
        let number = u32::try_from(self.frames.len()).ok()?;
        self.frames.push(frame.clone());
        self.numbers.insert(frame.clone(), number);
        Some(number)
    }

    /// The frames of a stack, innermost first.
    pub fn frames(&self, stack: StackNode) -> impl Iterator<Item = &NamedFrame> {
        let mut node = stack.0;
        std::iter::from_fn(move || {
            let (parent, frame) = *self.nodes.get((node as usize).checked_sub(1)?)?;
            node = parent;
            self.frames.get(frame as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(name: &str) -> NamedFrame {
        NamedFrame {
            file: "f.py".into(),
            line: 1,
            function: name.into(),
        }
    }

    #[test]
    fn common_callers_are_kept_once_and_stacks_come_back_whole() {
        let mut tree = Tree::default();
        let parse = [frame("parse"), frame("handle"), frame("main")];
        let render = [frame("render"), frame("handle"), frame("main")];
        let (a, b) = (tree.insert(&parse).unwrap(), tree.insert(&render).unwrap());
        assert_eq!(tree.nodes.len(), 4);
        assert_eq!(tree.insert(&parse), Some(a));
        assert_eq!(tree.frames(a).cloned().collect::<Vec<_>>(), parse);
        assert_eq!(tree.frames(b).cloned().collect::<Vec<_>>(), render);
        assert_eq!(tree.insert(&[]), Some(StackNode::default()));
        assert_eq!(tree.frames(StackNode::default()).count(), 0);
    }

    #[test]
    fn what_a_target_makes_up_without_end_is_not_kept() {
        let mut tree = Tree::default();
        let many = |n: usize| frame(&n.to_string());
        let kept = (0..2 * MAX_FRAMES)
            .filter(|&n| tree.insert(&[many(n)]).is_some())
            .count();
        assert_eq!((kept, tree.frames.len()), (MAX_FRAMES, MAX_FRAMES));
        let mut tree = Tree::default();
        let some: Vec<_> = (0..2048).map(many).collect();
        // Stacks of which each frame is a node of its own.
        let mut stack = 0;
        while tree
            .insert(
                &[
                    &some[stack % 2048..][..1],
                    &some[..stack / 2048 % 2048 + 1],
                    &some[1..1024],
                ]
                .concat(),
            )
            .is_some()
        {
            stack += 1024;
            assert!(tree.nodes.len() <= MAX_NODES && stack < 1 << 32);
        }
        assert_eq!(tree.nodes.len(), MAX_NODES);
    }
}
