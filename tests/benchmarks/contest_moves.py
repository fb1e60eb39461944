"""Moves of single groups on an instance of the contest: into the limit at the least cost, and cheaper within it.

What each state of each group would cost with the others as they are is known at all times: a move changes it for the
neighbours.
"""

import numpy as np
from contest import ILLEGAL

TRIED = 4_000  # moves before they are put into order again


class Moves:
    """Improves solutions of an instance. States are arrays with a number per group."""

    def __init__(self, instance):
        self.instance = instance
        graph = instance.graph
        sizes = np.array(graph.sizes)
        self.first = np.concatenate([[0], np.cumsum(sizes)])
        self.group = np.repeat(np.arange(len(sizes)), sizes)
        self.unary = np.concatenate(graph.unary)
        #: Of each group its neighbours: where their states are, and the table [own states, states of the neighbour].
        self.around = [[] for _ in graph.unary]
        for u, v, table in graph.pairs:
            self.around[u].append((int(self.first[v]), int(self.first[v + 1]), table))
            self.around[v].append((int(self.first[u]), int(self.first[u + 1]), table.T))
        self._lay_out_costs(graph)
        self._lay_out_usage()

    def _lay_out_costs(self, graph):
        """Where, in one array of all tables, the costs of each state begin, and how far apart its partner's are."""
        place, flat, at = {}, [np.zeros(0, np.int64)], 0
        for _, _, table in graph.pairs:
            if id(table) not in place:
                place[id(table)] = at
                flat.append(table.ravel())
                at += table.size
        self.flat = np.concatenate(flat)
        states, bases, steps, partners = ([np.zeros(0, np.int64)] for _ in range(4))
        for u, v, table in graph.pairs:
            rows, columns = table.shape
            for mine, other, count, stride, step in ((u, v, rows, columns, 1), (v, u, columns, 1, columns)):
                states.append(np.arange(self.first[mine], self.first[mine] + count))
                bases.append(place[id(table)] + stride * np.arange(count))
                steps.append(np.full(count, step))
                partners.append(np.full(count, other))
        states = np.concatenate(states)
        order = np.argsort(states, kind="stable")
        self.bases, self.steps, self.partners = (np.concatenate(each)[order] for each in (bases, steps, partners))
        self.paired, self.starts = np.unique(states[order], return_index=True)

    def _lay_out_usage(self):
        """What of the usage belongs to which node and to which state, and the nodes of each group that use any."""
        i = self.instance
        self.counts = np.diff(np.append(i.offset, len(i.usage)))
        self.user = np.repeat(np.arange(len(self.counts)), self.counts)
        self.state = np.arange(len(i.usage)) - i.offset[self.user] + self.first[i.group[self.user]]
        self.users = [[] for _ in i.graph.unary]
        self.all_users = np.unique(self.user[i.usage > 0])
        for v in self.all_users.tolist():
            self.users[i.group[v]].append(v)
        self.users = [np.array(nodes, int) for nodes in self.users]

    def held(self, per_node):
        """What each state of each group holds, times a factor of each node."""
        i = self.instance
        return np.bincount(self.state, i.usage * per_node[self.user], self.first[-1])

    def costs(self, states):
        """The cost of each state with the states that the other groups have."""
        costs = self.unary.copy()
        if len(self.starts):
            pairs = self.flat[self.bases + self.steps * states[self.partners]]
            costs[self.paired] += np.add.reduceat(pairs, self.starts)
        return costs

    def within(self, states, done):
        """States within the limit, or None: at the fullest moment, groups move to what holds less at the least cost for
        each byte.
        """
        i, at = self.instance, Position(self, states)
        while not done():
            t = int(at.profile.argmax())
            full = int(at.profile[t])
            if full <= i.limit:
                return at.states
            chosen, less = self._less(at, t)
            groups = self.group[chosen]
            more = at.costs[chosen] - at.costs[self.first[groups] + at.states[groups]]
            useful = (less > 0) & (more < ILLEGAL // 2)
            chosen, less, more = chosen[useful], less[useful], more[useful]
            each = np.where(more > 0, more / np.minimum(less, full - i.limit), more * less.astype(float))
            moved = set()
            for k in chosen[np.argsort(each, kind="stable")].tolist():
                g = int(self.group[k])
                if g not in moved and at.move(g, k):
                    moved.add(g)
                    if at.profile[t] <= i.limit:
                        break
            if not moved:
                return None
        return None

    def _less(self, at, t):
        """The states of the groups that use something at a moment, and how much less each uses than what is there."""
        i = self.instance
        nodes = self.all_users[(i.begin[self.all_users] <= t) & (t < i.end[self.all_users])]
        counts = self.counts[nodes]
        entries = np.arange(counts.sum()) + np.repeat(i.offset[nodes] - (np.cumsum(counts) - counts), counts)
        states, place = np.unique(self.state[entries], return_inverse=True)
        held = np.bincount(place, i.usage[entries], len(states)).astype(np.int64)
        groups = self.group[states]
        return states, held[np.searchsorted(states, self.first[groups] + at.states[groups])] - held

    def polish(self, states, done):
        """Cheaper states within the limit, from states within it."""
        at = Position(self, states)
        moved = True
        while moved and not done():
            gain = at.costs[self.first[:-1] + at.states][self.group] - at.costs
            chosen = np.flatnonzero(gain > 0)
            moved = False
            for k in chosen[np.argsort(-gain[chosen], kind="stable")][:TRIED].tolist():
                g = int(self.group[k])
                if at.costs[k] < at.costs[self.first[g] + at.states[g]]:
                    moved |= at.move(g, k)
        return at.states


class Position:
    """States with what they use at every moment, and with the cost of each state as the others are."""

    def __init__(self, moves, states):
        self.moves, self.states = moves, states.copy()
        self.profile = moves.instance.profile(states)
        self.costs = moves.costs(states)

    def move(self, g, k):
        """Let a group have a state, by its number among those of all, if no moment that is full becomes fuller."""
        moves = self.moves
        first = int(moves.first[g])
        old, new = int(self.states[g]), k - first
        if not self._fits(g, old, new):
            return False
        self.states[g] = new
        for begin, end, table in moves.around[g]:
            self.costs[begin:end] += table[new] - table[old]
        return True

    def _fits(self, g, old, new):
        """Change the profile by a move, if it fits."""
        i, nodes = self.moves.instance, self.moves.users[g]
        at = i.offset[nodes]
        change = i.usage[at + new] - i.usage[at + old]
        if len(nodes) == 1:
            begin, end, more = i.begin[nodes[0]], i.end[nodes[0]], change[0]
            here = self.profile[begin:end]
            if more > 0 and here.max() + more > i.limit:
                return False
            here += more
            return True
        changed = np.flatnonzero(change)
        if not len(changed):
            return True
        change, nodes = change[changed], nodes[changed]
        low, high = int(i.begin[nodes].min()), int(i.end[nodes].max())
        steps = np.zeros(high - low + 1, np.int64)
        np.add.at(steps, i.begin[nodes] - low, change)
        np.subtract.at(steps, i.end[nodes] - low, change)
        steps = np.cumsum(steps)[:-1]
        here = self.profile[low:high]
        if change.max() > 0 and ((steps > 0) & (here + steps > i.limit)).any():
            return False
        here += steps
        return True
