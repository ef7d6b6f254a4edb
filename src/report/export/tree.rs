//! Stacks joined into a tree: equal beginnings are one path.

use super::{Export, Metric, NO_STACK, Numbering};
use crate::profile::model::{Live, StackFrame};

/// A place in the tree. Its numbers are those of all stacks that go through it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    /// Number of its frame.
    pub(super) frame: u32,
    /// 0 for the root; a node belongs to the last one before it that is less deep.
    pub(super) depth: u32,
    /// Whole numbers, in the order of [`Metric::ALL`].
    pub(super) values: [u64; 4],
    /// Bytes and objects that are alive, with their variances.
    pub(super) live: Live,
}

/// The tree.
#[derive(Debug)]
pub(super) struct Tree<'a> {
    /// Frame 0 is the root's and stands for everything, frame 1 for an unknown stack; both are empty.
    pub(super) frames: Vec<StackFrame<'a>>,
    /// Each node is before what is above it, the root first.
    pub(super) nodes: Vec<Node>,
}

impl<'a> Tree<'a> {
    /// Builds it; what counts nothing is left out. The time and memory it takes are those of all stacks together.
    pub(super) fn new(export: &Export<'a>) -> Self {
        let empty = |name| StackFrame {
            file: "".into(),
            line: 0,
            function: Some(name),
        };
        let mut numbering = Numbering::new();
        let mut tree = Self {
            frames: vec![empty("all"), empty(NO_STACK)],
            nodes: vec![Node {
                frame: 0,
                depth: 0,
                values: [0; 4],
                live: Live::default(),
            }],
        };
        let values = Metric::ALL.map(|metric| export.whole(metric));
        // The nodes from the root to where the last stack ended.
        let mut path = vec![0usize];
        for (place, trace) in export.traces.iter().enumerate() {
            let values = [0, 1, 2, 3].map(|kind: usize| values[kind][place]);
            if values.iter().all(|value| *value == 0) {
                continue;
            }
            let mut stack: Vec<_> = trace
                .frames
                .iter()
                .map(|frame| {
                    let (number, is_new) = numbering.number(frame.clone());
                    if is_new {
                        tree.frames.push(frame.clone());
                    }
                    number + 2
                })
                .collect();
            if stack.is_empty() {
                stack.push(1);
            }
            let nodes = &mut tree.nodes;
            let shared = path[1..]
                .iter()
                .zip(&stack)
                .take_while(|(node, frame)| nodes[**node].frame == **frame)
                .count();
            path.truncate(shared + 1);
            for frame in &stack[shared..] {
                nodes.push(Node {
                    frame: *frame,
                    depth: path.len() as u32,
                    values: [0; 4],
                    live: Live::default(),
                });
                path.push(nodes.len() - 1);
            }
            for node in &path {
                nodes[*node].live.add(&trace.live);
                for (sum, value) in nodes[*node].values.iter_mut().zip(values) {
                    *sum += value;
                }
            }
        }
        tree
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{export, frame, sample, trace};
    use super::*;

    fn shape(tree: &Tree<'_>) -> Vec<(u32, u32, u64)> {
        tree.nodes
            .iter()
            .map(|node| (node.depth, node.frame, node.values[0]))
            .collect()
    }

    #[test]
    fn equal_beginnings_are_one_path() {
        let sample = sample();
        let tree = Tree::new(&sample);
        assert_eq!(
            shape(&tree),
            [
                (0, 0, 1651),
                (1, 1, 101),
                (1, 2, 1500),
                (2, 3, 1000),
                (2, 4, 500),
                (1, 5, 50)
            ]
        );
        assert!((tree.nodes[0].live.bytes - 1650.75).abs() < 1e-9);
        assert_eq!(tree.frames[3], frame("leak.py", 7, Some("grow")));
    }

    #[test]
    fn recursion_is_a_path_and_ends_within_a_stack_add_up() {
        let f = frame("a.py", 1, Some("f"));
        let stacks = [1usize, 2, 3].map(|depth| trace(depth as u32, vec![f.clone(); depth], 10.0, 1.0));
        let export = export(stacks.into());
        assert_eq!(
            shape(&Tree::new(&export)),
            [(0, 0, 30), (1, 2, 30), (2, 2, 20), (3, 2, 10)]
        );
    }
}
