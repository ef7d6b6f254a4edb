//! Who refers to whom, as numbers: shortest ways from what the program holds, and dominators, which tell what would be freed.
//!
//! An object dominates another when every way from the roots to the other leads through it: without the one, the other is
//! gone. Example: a module holds a dict, the dict two lists, both lists the same string. The dict dominates all three; neither
//! list dominates the string. So the dict retains everything, each list only itself.
//!
//! The dominators are those of Georgiadis' semi-NCA algorithm, as iterative as everything here: a linked list of ten million
//! objects is no deeper for it than any.

/// No node.
pub const NONE: u32 = u32::MAX;

/// Edges from each node to others, in the order of nodes.
#[derive(Debug, Default)]
pub struct Graph {
    /// Where the edges of each node begin; one more at the end.
    starts: Vec<u32>,
    targets: Vec<u32>,
}

/// How each node is reached.
#[derive(Debug)]
pub struct Reached {
    /// The node before it on a shortest way, [`NONE`] for a root and for what is not reached.
    pub before: Vec<u32>,
    /// Which set of roots it is reached from.
    pub from: Vec<u8>,
    /// It is one of the roots.
    pub roots: Vec<u32>,
}

/// A node that no root has reached.
const UNREACHED: u8 = u8::MAX;

impl Graph {
    /// A graph without nodes.
    #[must_use]
    pub fn new() -> Self {
        Self {
            starts: vec![0],
            targets: Vec::new(),
        }
    }

    /// Adds an edge from the node that is not finished yet.
    pub fn edge(&mut self, to: u32) {
        // More than 2^32 edges would need 16 GiB: the rest is left out, and nothing is retained by it.
        if self.targets.len() < u32::MAX as usize {
            self.targets.push(to);
        }
    }

    /// The node that edges were added to is finished.
    pub fn finish_node(&mut self) {
        self.starts.push(self.targets.len() as u32);
    }

    /// How many nodes are finished.
    #[must_use]
    pub const fn nodes(&self) -> usize {
        self.starts.len() - 1
    }

    /// Where the edges of a node lead.
    #[must_use]
    pub fn from(&self, node: u32) -> &[u32] {
        let at = |node: usize| self.starts.get(node).copied().unwrap_or(0) as usize;
        let node = node as usize;
        self.targets.get(at(node)..at(node + 1)).unwrap_or_default()
    }

    /// Finds a shortest way to every node: first from the first set of roots, then, to what is left, from the next. What none
    /// of them reaches becomes a root of its own, at first what nothing refers to, then one of each ring.
    #[must_use]
    pub fn reach(&self, sets: &[Vec<u32>]) -> Reached {
        let nodes = self.nodes();
        let mut reached = Reached {
            before: vec![NONE; nodes],
            from: vec![UNREACHED; nodes],
            roots: Vec::new(),
        };
        let mut set = 0;
        for roots in sets {
            self.spread(&mut reached, roots, set);
            set += 1;
        }
        let mut referred = vec![false; nodes];
        for node in 0..nodes as u32 {
            if reached.from.get(node as usize) != Some(&UNREACHED) {
                continue;
            }
            for to in self.from(node).iter().filter(|to| **to != node) {
                if let Some(referred) = referred.get_mut(*to as usize) {
                    *referred = true;
                }
            }
        }
        let is_left = |reached: &Reached, node: u32| reached.from.get(node as usize) == Some(&UNREACHED);
        let free = |node: &u32| is_left(&reached, *node) && referred.get(*node as usize) == Some(&false);
        let free: Vec<u32> = (0..nodes as u32).filter(free).collect();
        self.spread(&mut reached, &free, set);
        for node in 0..nodes as u32 {
            if is_left(&reached, node) {
                self.spread(&mut reached, &[node], set);
            }
        }
        reached
    }

    fn spread(&self, reached: &mut Reached, roots: &[u32], set: u8) {
        let mut queue = std::collections::VecDeque::new();
        for root in roots {
            match reached.from.get_mut(*root as usize) {
                Some(from) if *from == UNREACHED => *from = set,
                _ => continue,
            }
            reached.roots.push(*root);
            queue.push_back(*root);
        }
        while let Some(node) = queue.pop_front() {
            for to in self.from(node) {
                match reached.from.get_mut(*to as usize) {
                    Some(from) if *from == UNREACHED => *from = set,
                    _ => continue,
                }
                if let Some(before) = reached.before.get_mut(*to as usize) {
                    *before = node;
                }
                queue.push_back(*to);
            }
        }
    }

    /// The size of all that is reached from `roots` when some nodes are gone.
    #[must_use]
    pub fn alive_without(&self, roots: &[u32], sizes: &[u64], is_gone: impl Fn(u32) -> bool) -> u64 {
        let mut met = vec![false; self.nodes()];
        let mut todo: Vec<u32> = Vec::new();
        let mut alive = 0_u64;
        let mut meet = |node: u32, todo: &mut Vec<u32>| match met.get_mut(node as usize) {
            Some(met) if !*met && !is_gone(node) => {
                *met = true;
                todo.push(node);
            }
            _ => {}
        };
        for root in roots {
            meet(*root, &mut todo);
        }
        while let Some(node) = todo.pop() {
            alive = alive.saturating_add(sizes.get(node as usize).copied().unwrap_or(0));
            for to in self.from(node) {
                meet(*to, &mut todo);
            }
        }
        alive
    }

    /// The dominators of all nodes, seen from `roots` together.
    #[must_use]
    pub fn dominators(&self, roots: &[u32]) -> Dominators {
        Dominators::new(self, roots)
    }
}

/// Dominators. Nodes are numbered in the order of a walk; number 0 is what holds all roots.
#[derive(Debug)]
pub struct Dominators {
    /// The node of each number, from 1 on: `order[number - 1]`.
    order: Vec<u32>,
    /// The number of each node; 0 for those that are not reached.
    number: Vec<u32>,
    /// The dominator of each number, which is a lower one.
    above: Vec<u32>,
}

impl Dominators {
    fn new(graph: &Graph, roots: &[u32]) -> Self {
        let nodes = graph.nodes();
        let mut order = Vec::with_capacity(nodes);
        let mut number = vec![0_u32; nodes];
        let mut parent = vec![0_u32];
        // A walk in depth: each node with how many of its edges were followed.
        let mut stack: Vec<(u32, u32)> = Vec::new();
        for root in roots {
            let enter =
                |node: u32, from: u32, order: &mut Vec<u32>, number: &mut [u32], parent: &mut Vec<u32>| match number
                    .get_mut(node as usize)
                {
                    Some(number) if *number == 0 => {
                        order.push(node);
                        parent.push(from);
                        *number = order.len() as u32;
                        true
                    }
                    _ => false,
                };
            if enter(*root, 0, &mut order, &mut number, &mut parent) {
                stack.push((*root, 0));
            }
            while let Some((node, followed)) = stack.last_mut() {
                let Some(to) = graph.from(*node).get(*followed as usize).copied() else {
                    stack.pop();
                    continue;
                };
                *followed += 1;
                let from = number.get(*node as usize).copied().unwrap_or(0);
                if enter(to, from, &mut order, &mut number, &mut parent) {
                    stack.push((to, 0));
                }
            }
        }
        drop(stack);
        let above = semi_nca(graph, roots, &order, &number, parent);
        Self { order, number, above }
    }

    /// What each node retains: its own `sizes` and those of all that it dominates.
    #[must_use]
    pub fn retained(&self, sizes: &[u64]) -> Vec<u64> {
        let size = |node: u32| sizes.get(node as usize).copied().unwrap_or(0);
        let mut by_number: Vec<u64> = std::iter::once(0)
            .chain(self.order.iter().map(|node| size(*node)))
            .collect();
        for number in (1..by_number.len()).rev() {
            let own = by_number.get(number).copied().unwrap_or(0);
            let above = self.above.get(number).copied().unwrap_or(0);
            if let Some(above) = by_number.get_mut(above as usize) {
                *above = above.saturating_add(own);
            }
        }
        let of = |number: &u32| by_number.get(*number as usize).copied().unwrap_or(0);
        self.number
            .iter()
            .map(|number| if *number == 0 { 0 } else { of(number) })
            .collect()
    }

    /// What the nodes of each of `count` kinds retain, each for itself: each node that no other one of its kind dominates, with all
    /// that it does. What several of a kind hold only together is not in it: [`Graph::alive_without`] has that, for one kind.
    #[must_use]
    pub fn retained_by_kind(&self, kinds: &[u32], count: usize, retained: &[u64]) -> Vec<u64> {
        let mut sums = vec![0_u64; count];
        // Of its kind, so many dominate the number that the walk is at.
        let mut open = vec![0_u32; count];
        let (first, next) = self.below();
        let node = |number: u32| self.order.get((number as usize).wrapping_sub(1)).copied();
        let kind = |number: u32| Some(*kinds.get(node(number)? as usize)? as usize);
        let mut at = 0_u32;
        let mut go = first.first().copied().unwrap_or(0);
        loop {
            if go != 0 {
                at = go;
                if let Some((open, sum)) = kind(at).and_then(|kind| Some((open.get_mut(kind)?, sums.get_mut(kind)?))) {
                    if *open == 0 {
                        let own = node(at)
                            .and_then(|node| retained.get(node as usize))
                            .copied()
                            .unwrap_or(0);
                        *sum = sum.saturating_add(own);
                    }
                    *open += 1;
                }
                go = first.get(at as usize).copied().unwrap_or(0);
                continue;
            }
            if at == 0 {
                return sums;
            }
            if let Some(open) = kind(at).and_then(|kind| open.get_mut(kind)) {
                *open -= 1;
            }
            go = next.get(at as usize).copied().unwrap_or(0);
            at = self.above.get(at as usize).copied().unwrap_or(0);
        }
    }

    /// For each number the first one that it dominates directly, and the next one that its dominator does; 0 for none.
    fn below(&self) -> (Vec<u32>, Vec<u32>) {
        let count = self.order.len() + 1;
        let (mut first, mut next) = (vec![0_u32; count], vec![0_u32; count]);
        for number in (1..count).rev() {
            let above = self.above.get(number).copied().unwrap_or(0) as usize;
            if let (Some(first), Some(next)) = (first.get_mut(above), next.get_mut(number)) {
                *next = *first;
                *first = number as u32;
            }
        }
        (first, next)
    }
}

/// The dominator of each number.
fn semi_nca(graph: &Graph, roots: &[u32], order: &[u32], number: &[u32], mut parent: Vec<u32>) -> Vec<u32> {
    let count = parent.len();
    let (starts, sources) = backwards(graph, roots, order, number);
    let mut above = parent.clone();
    let mut semi: Vec<u32> = (0..count as u32).collect();
    let mut label: Vec<u32> = semi.clone();
    let mut path = Vec::new();
    for node in (1..count).rev() {
        let mut least = parent[node];
        for source in &sources[starts[node] as usize..starts[node + 1] as usize] {
            let best = evaluate(*source, node as u32 + 1, &mut parent, &mut label, &semi, &mut path);
            least = least.min(semi[best as usize]);
        }
        semi[node] = least;
    }
    for node in 1..count {
        let mut candidate = above[node];
        while candidate > semi[node] {
            candidate = above[candidate as usize];
        }
        above[node] = candidate;
    }
    above
}

/// Of the nodes on the way up from `node` as far as it was linked, the one with the least semi-dominator; the way is shortened.
fn evaluate(node: u32, linked: u32, parent: &mut [u32], label: &mut [u32], semi: &[u32], path: &mut Vec<u32>) -> u32 {
    let mut at = node;
    path.clear();
    while parent[at as usize] >= linked {
        path.push(at);
        at = parent[at as usize];
    }
    let mut best = label[at as usize];
    let mut up = parent[at as usize];
    while let Some(at) = path.pop() {
        parent[at as usize] = up;
        let own = label[at as usize];
        if semi[best as usize] < semi[own as usize] {
            label[at as usize] = best;
        } else {
            best = own;
        }
        up = parent[at as usize];
    }
    best
}

/// For each number those of the nodes that refer to it.
fn backwards(graph: &Graph, roots: &[u32], order: &[u32], number: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let count = order.len() + 1;
    let mut starts = vec![0_u32; count + 1];
    let edges = |take: &mut dyn FnMut(u32, u32)| {
        for root in roots {
            take(0, number.get(*root as usize).copied().unwrap_or(0));
        }
        for (i, node) in order.iter().enumerate() {
            for to in graph.from(*node) {
                take(i as u32 + 1, number.get(*to as usize).copied().unwrap_or(0));
            }
        }
    };
    edges(&mut |_, to| starts[to as usize + 1] += 1);
    for i in 1..starts.len() {
        starts[i] += starts[i - 1];
    }
    let mut next = starts.clone();
    let mut sources = vec![0_u32; starts[count] as usize];
    edges(&mut |from, to| {
        sources[next[to as usize] as usize] = from;
        next[to as usize] += 1;
    });
    (starts, sources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};

    fn graph(edges: &[Vec<u32>]) -> Graph {
        let mut graph = Graph::new();
        for node in edges {
            node.iter().for_each(|to| graph.edge(*to));
            graph.finish_node();
        }
        graph
    }

    /// Which nodes are reached without one of them.
    fn alive(edges: &[Vec<u32>], roots: &[u32], without: Option<u32>) -> Vec<bool> {
        let mut alive = vec![false; edges.len()];
        let mut todo: Vec<u32> = roots.to_vec();
        while let Some(node) = todo.pop() {
            if Some(node) != without && !alive[node as usize] {
                alive[node as usize] = true;
                todo.extend(&edges[node as usize]);
            }
        }
        alive
    }

    #[test]
    fn the_example_of_the_documentation() {
        // Module, dict, two lists, string.
        let edges = [vec![1], vec![2, 3], vec![4], vec![4], vec![]];
        let dominators = graph(&edges).dominators(&[0]);
        let retained = dominators.retained(&[1, 10, 100, 100, 1000]);
        assert_eq!(retained, [1211, 1210, 100, 100, 1000]);
        // Both lists are of one kind; without both the string is gone, too.
        assert_eq!(
            dominators.retained_by_kind(&[0, 1, 2, 2, 3], 4, &retained),
            [1211, 1210, 200, 1000]
        );
        let alive = graph(&edges).alive_without(&[0], &[1, 10, 100, 100, 1000], |node| node == 2 || node == 3);
        assert_eq!(alive, 11);
    }

    #[test]
    fn retained_is_what_is_gone_without_it() {
        let mut random = rand::rngs::SmallRng::seed_from_u64(23);
        for _ in 0..400 {
            let nodes = random.random_range(1..40_u32);
            let density = random.random_range(1..4);
            let edges: Vec<Vec<u32>> = (0..nodes)
                .map(|_| {
                    (0..random.random_range(0..=density))
                        .map(|_| random.random_range(0..nodes))
                        .collect()
                })
                .collect();
            let sizes: Vec<u64> = (0..nodes).map(|_| random.random_range(1..1000)).collect();
            let roots: Vec<u32> = (0..random.random_range(1..4))
                .map(|_| random.random_range(0..nodes))
                .collect();
            let dominators = graph(&edges).dominators(&roots);
            let retained = dominators.retained(&sizes);
            let all = alive(&edges, &roots, None);
            let kinds: Vec<u32> = (0..nodes).map(|_| random.random_range(0..4)).collect();
            // The least: it is not below that of one of them, and all are gone without all.
            let by_kind = dominators.retained_by_kind(&kinds, 4, &retained);
            let sum: u64 = (0..nodes as usize)
                .filter(|node| all[*node])
                .map(|node| sizes[node])
                .sum();
            for (kind, retains) in by_kind.iter().enumerate() {
                let of = |node: &usize| kinds[*node] == kind as u32;
                let most = (0..nodes as usize)
                    .filter(of)
                    .map(|node| retained[node])
                    .max()
                    .unwrap_or(0);
                let gone = sum - graph(&edges).alive_without(&roots, &sizes, |node| of(&(node as usize)));
                assert!(
                    most <= *retains && *retains <= gone,
                    "{kind} of {edges:?}: {most} {retains} {gone}"
                );
            }
            for node in 0..nodes {
                let rest = alive(&edges, &roots, Some(node));
                let gone = (0..nodes as usize).filter(|other| all[*other] && !rest[*other]);
                let expected: u64 = gone.map(|other| sizes[other]).sum();
                assert_eq!(retained[node as usize], expected, "{node} of {edges:?} from {roots:?}");
            }
        }
    }

    #[test]
    fn ways_are_shortest_and_everything_has_one() {
        // Two roots, a chain, a ring that nobody holds, and one that something holds which nobody does.
        let edges = [
            vec![2],
            vec![3],
            vec![3],
            vec![],
            vec![5],
            vec![4],
            vec![7],
            vec![8],
            vec![7],
        ];
        let reached = graph(&edges).reach(&[vec![0], vec![1]]);
        assert_eq!(reached.from, [0, 1, 0, 0, 2, 2, 2, 2, 2]);
        assert_eq!(reached.before, [NONE, NONE, 0, 2, NONE, 4, NONE, 6, 7]);
        let mut roots = reached.roots;
        roots.sort_unstable();
        assert_eq!(roots, [0, 1, 4, 6]);
    }

    #[test]
    fn a_long_chain_is_no_deeper_than_any() {
        let nodes = 300_000_u32;
        let edges: Vec<Vec<u32>> = (0..nodes)
            .map(|i| if i + 1 < nodes { vec![i + 1] } else { vec![0] })
            .collect();
        let retained = graph(&edges).dominators(&[0]).retained(&vec![1; nodes as usize]);
        assert!((0..nodes).all(|i| retained[i as usize] == u64::from(nodes - i)));
    }
}
