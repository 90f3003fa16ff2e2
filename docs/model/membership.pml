/*
 * How long a lease excludes the others, while processes lose their vote and get one at the same
 * index.
 *
 * redfence.pml is about tokens and has no time. This model has no tokens, and as much time as
 * exclusion needs:
 *   - a lease is valid from a request of its holder that a quorum answered, until it lapses;
 *   - a node keeps the hold of a lease at least as long as the validity that it answered for;
 *   - the wait of a fence is over when each lease has lapsed whose validity comes from a request
 *     that was sent before the wait began. A server waits longer than that. So this is the least
 *     that a wait guarantees.
 *
 * There are three indexes, so a quorum is two. Process 0 stands at index 0, processes 1 and 2 at
 * the others. Process 3 is the double: a second process at index 0. There is one resource. Every
 * step is atomic, and any enabled step may be next.
 *
 * The invariant is an assertion at the step that could break it:
 *   exclusive   a lease that is granted or renewed is the only valid lease
 *
 * Every #ifdef but GOAL and SEEN_n is a mutant: one rule is left out, and the checker must find a violation.
 * README.md tells more.
 */

/* --- size ------------------------------------------------------------------------------------- */

#ifndef LEASES
#define LEASES 2
#endif
#ifndef DRIVERS
#define DRIVERS 1      /* how often a server begins to give a node its vote; it may stop anywhere */
#endif
#ifndef NEWCOMER
#define NEWCOMER 0     /* 1: an empty process appears at index 0, and process 0 lives on */
#endif
#ifndef OLD_IS_OUT
#define OLD_IS_OUT 0   /* before we begin, process 0 has 1: lost its data; 2: restarted, and reserved 1 */
#endif
#ifndef LOSSES
#define LOSSES 0       /* how often a node loses all data */
#endif
#ifndef RESTARTS
#define RESTARTS 0     /* how often a node restarts with proof that it lost nothing */
#endif
#ifndef RELAXED
#define RELAXED 0      /* 1: one trusted peer suffices for a node with proof if the other is out */
#endif

#define PROCESSES (3 + NEWCOMER)
#define index_of(p)  ((p) % 3)
#define bit(p)       (1 << (p))
#define larger(x, y) ((x) > (y) -> (x) : (y))

/* --- state ------------------------------------------------------------------------------------ */

#define ABSENT      0
#define QUARANTINED 1  /* it may have forgotten */
#define RESTARTED   2  /* a quarantine as well, but the node proved that it lost nothing */
#define VOTES       3

typedef Node {
  byte state;
  byte holder;      /* the lease that holds the lock, counted from 1; 0: the lock is free */
  byte high;        /* the greatest token. Only fences raise it here */
  byte floor;       /* under which it got its vote last */
  byte reserved;    /* in this quarantine; 0: nothing */
  byte floor_0;     /* `floor:0`: the least floor of a process that may vote at index 0 */
  /* the process for which it was noted, in its present quarantine, counted from 1; 0: another one */
  byte fenced_by;
  byte fenced_for;  /* that process, also when its quarantine is over */
  /* a server that uses the present id of this node has read at least this `floor:0` there */
  byte read_0;
#if RELAXED
  bool nameless;    /* empty, and no server has given it an identity yet */
#endif
};
Node node[4];

typedef Lease {
  byte request;     /* IDLE, SENT or DECIDED */
  byte admitted;    /* the nodes that can still answer the request */
  byte answered;
  byte sent_before; /* the drivers whose wait began after the request was sent */
  bool granted;
  bool valid;
  /* the nodes that answered the request from which the validity comes, or a later one */
  byte support;
  byte from_before; /* the drivers whose wait began after that request was sent */
};
Lease lease[LEASES];
#define IDLE    0
#define SENT    1
#define DECIDED 2   /* later answers change nodes only */

typedef Driver {
  byte goal;        /* the node, counted from 1; 0: not begun; OUT: over */
  bool current;     /* the node is still in the quarantine that the driver found */
  /* the nodes that it has read, and that still have the id they were read under */
  byte read;
  byte raised;      /* the nodes on which it has raised the floor */
  /* the greatest token that it has read; once it has reserved a floor, that floor */
  byte high;
  byte floor_0;     /* the greatest `floor:0` that it has read */
  byte floor_0_for; /* the process for which it was raised, counted from 1; 0: not known */
  bool superseded;  /* a peer knows a fence for another process at index 0, later than this one's vote */
  bool reserved;
  bool waits;
#if RELAXED
  byte out;         /* the peer that was examined and has no vote */
#endif
};
Driver driver[DRIVERS];
#define OUT 255

bool appeared;
byte losses_left = LOSSES, restarts_left = RESTARTS;

hidden byte i, j, k;
hidden byte exclusive = 1;

#define N node[p]
#define L lease[a]
#define D driver[d]

/* --- waits ------------------------------------------------------------------------------------ */

inline begin_wait()
{
  D.waits = true;
  for (i : 0 .. LEASES - 1) {
    if :: lease[i].valid -> lease[i].from_before = lease[i].from_before | bit(d) :: else fi;
    if :: lease[i].request == SENT -> lease[i].sent_before = lease[i].sent_before | bit(d) :: else fi };
  skip
}
#define lapsed(x) !(lease[x].valid && (lease[x].from_before & bit(d)))
#if LEASES == 2
#define is_over (lapsed(0) && lapsed(1))
#else
#define is_over (lapsed(0) && lapsed(1) && lapsed(2))
#endif

/* A request of before the wait gives no validity any more. */
inline end_wait()
{
  for (i : 0 .. LEASES - 1) {
    if :: lease[i].request == SENT && (lease[i].sent_before & bit(d)) -> drop_request(i) :: else fi };
  skip
}

/* What an attempt has made is undone or expires: nothing depends on it. */
inline drop_request(x)
{
  lease[x].request = IDLE; lease[x].admitted = 0; lease[x].answered = 0; lease[x].sent_before = 0;
  for (j : 0 .. PROCESSES - 1) {
    if :: !lease[x].granted && node[j].holder == x + 1 -> node[j].holder = 0 :: else fi };
  skip
}

inline leave(x)
{
  driver[x].goal = OUT; driver[x].current = false; driver[x].read = 0; driver[x].raised = 0; driver[x].high = 0;
  driver[x].floor_0 = 0; driver[x].floor_0_for = 0; driver[x].superseded = false; driver[x].reserved = false; driver[x].waits = false;
#if RELAXED
  driver[x].out = 0;
#endif
  for (j : 0 .. LEASES - 1) {
    lease[j].from_before = lease[j].from_before & ~bit(x);
    lease[j].sent_before = lease[j].sent_before & ~bit(x) };
  skip
}

/* --- admission ids ---------------------------------------------------------------------------- */

/* The node gets a new random id. It refuses what was sent under the old one. */
inline renew_id(p)
{
#ifndef POLL_MIXED
  for (i : 0 .. LEASES - 1) {
    lease[i].admitted = lease[i].admitted & ~bit(p);
    if :: lease[i].request == DECIDED && !lease[i].admitted -> lease[i].request = IDLE :: else fi };
#endif
  for (i : 0 .. DRIVERS - 1) {
    if
    :: driver[i].goal == OUT -> skip
    :: else ->
       if
       :: (driver[i].read & bit(p)) && !(driver[i].raised & bit(p)) -> leave(i)
       :: else -> driver[i].read = driver[i].read & ~bit(p)
       fi
    fi };
  N.read_0 = N.floor_0
}

/* A new quarantine begins, so no driver is in the one that it found. */
inline end_quarantine(p)
{
  N.reserved = 0;
  for (i : 0 .. DRIVERS - 1) { if :: driver[i].goal == p + 1 -> driver[i].current = false :: else fi };
  for (i : 0 .. 2) { if :: node[i].fenced_by == p + 1 -> node[i].fenced_by = 0 :: else fi }
}
/*
 * A server talks to process x at index 0 until it reads a greater `floor:0` anywhere. So one that
 * uses x and the present id of p is possible exactly if x has the floor that was to be read when
 * p got that id.
 */
#define agree(x, p) (node[x].floor >= node[p].read_0)
#define may_use(x, p) (node[p].state == VOTES && (x == 9 || agree(x, p)))

/* --- a holder asks for a grant or a renewal --------------------------------------------------- */

/* A hold may have expired, unless its lease is valid by what this node answered. */
#define other (N.holder - 1)
#define is_kept(p) (N.holder && lease[other].valid && (lease[other].support & bit(p)))
#define is_kept_for_request(p) (N.holder && lease[other].valid && lease[other].request == SENT && (lease[other].answered & bit(p)))
#define may_answer(p) (N.state == VOTES && \
  (N.holder == a + 1 || (!L.granted && (N.holder == 0 || !(is_kept(p) || is_kept_for_request(p))))))

/*
 * It asks all nodes to which its server is admitted, and sends the request just before the first
 * answer.
 */
#define is_begun(x) (lease[x].request || lease[x].granted)
inline ask(x, p)
{
  d_step {
    L.request != SENT && (a == 0 || is_begun((a -> a - 1 : 0))) && may_answer(p) && (index_of(p) || p == x) && (x == 9 || node[x].state == VOTES) &&
    (index_of(p) == 0 || may_use(x, p)) ->
    drop_request(a);
    L.request = SENT;
#ifdef POLL_MIXED
    L.admitted = (x == 9 -> 0 : bit(x)) | bit(1) | bit(2);
#else
    L.admitted = (x == 9 -> 0 : bit(x)) | (may_use(x, 1) -> bit(1) : 0) | (may_use(x, 2) -> bit(2) : 0);
#endif
    if :: x == 9 -> printf("lease %d asks, without index 0\n", a)
       :: else -> printf("lease %d asks, at index 0 process %d\n", a, x) fi;
    take(p)
  }
}

inline take(p)
{
  if
  :: N.holder && N.holder != a + 1 ->
     k = other;
     printf("the hold of lease %d on node %d expires\n", k, p);
     /* It was answered after the request was sent. So that gives no validity any more. */
     if :: lease[k].request == SENT && (lease[k].answered & bit(p)) -> drop_request(k) :: else fi
  :: else
  fi;
  N.holder = a + 1;
  L.admitted = L.admitted & ~bit(p);
#ifdef POLL_MIXED
  /*
   * The server looks at the node, drops what has the lesser floor at index 0, and keeps its
   * earlier answer.
   */
  if :: index_of(p) -> L.admitted = L.admitted & ~((agree(0, p) -> 0 : bit(0)) | (agree(3, p) -> 0 : bit(3))) :: else fi;
#endif
  if
  :: L.request == SENT -> L.answered = L.answered | bit(p)
  :: else -> if :: L.valid -> L.support = L.support | bit(p) :: else fi;
             if :: L.admitted == 0 -> L.request = IDLE :: else fi
  fi;
  printf("node %d answers lease %d\n", p, a)
}

inline answer(p)
{
  d_step {
    L.request != IDLE && (L.admitted & bit(p)) && may_answer(p) ->
    take(p)
  }
}

/*
 * What must be possible. With GOAL set to one of these, the checker has to find it. With SEEN_1 to
 * SEEN_3 set, a whole search prints which of them it has met. `told` is no part of a state.
 */
#define tell(goal) if :: (goal) -> c_code { static int told; if (!told) { told = 1; printf("seen: %s\n", #goal); } } :: else fi
#define ON_THE_DOUBLE (!L.granted && (L.answered & bit(3)))
#define AFTER_ANOTHER (!L.granted && lease[1 - a].granted)
#define RENEWED_ON_THE_OLD (L.granted && (L.answered & bit(0)) && node[3].state == QUARANTINED && node[3].reserved)
#define RENEWED_AFTER_A_RESTART (L.granted && L.valid && restarts_left < RESTARTS && (L.answered & 7) == 7 && node[0].floor && node[1].floor)
#define ON_A_NODE_THAT_CAME_BACK (!L.granted && (L.answered & 2) && node[1].floor)

inline succeed(p, q)
{
  d_step {
    L.request == SENT && (L.answered & bit(p)) && (L.answered & bit(q)) ->
    if :: L.granted -> printf("lease %d is renewed\n", a) :: else -> printf("lease %d is granted\n", a) fi;
#ifdef GOAL
    assert(!(GOAL));
#endif
#ifdef SEEN_1
    tell(SEEN_1);
#endif
#ifdef SEEN_2
    tell(SEEN_2);
#endif
#ifdef SEEN_3
    tell(SEEN_3);
#endif
    for (i : 0 .. LEASES - 1) { exclusive = exclusive && (i == a || !lease[i].valid) };
#ifndef GOAL
    assert(exclusive);
#endif
    L.request = (L.admitted -> DECIDED : IDLE);
    L.granted = true;
    L.valid = true;
    L.support = L.answered;
    L.answered = 0;
    L.from_before = L.sent_before;
    L.sent_before = 0
  }
}

inline lapse()
{
  d_step {
    L.valid ->
    L.valid = false; L.support = 0; L.from_before = 0;
    printf("lease %d lapses\n", a)
  }
}

#if NEWCOMER
#define ON_EACH_NODE(step) :: step(0) :: step(1) :: step(2) :: step(3)
#define ON_EACH_QUORUM(step) :: step(0, 1) :: step(0, 2) :: step(1, 2) :: step(3, 1) :: step(3, 2)
#define ON_EACH_CONNECTION(step) :: step(0, 0) :: step(0, 1) :: step(0, 2) :: step(3, 3) :: step(3, 1) :: step(3, 2) :: step(9, 1) :: step(9, 2)
#else
#define ON_EACH_NODE(step) :: step(0) :: step(1) :: step(2)
#define ON_EACH_QUORUM(step) :: step(0, 1) :: step(0, 2) :: step(1, 2)
#define ON_EACH_CONNECTION(step) :: step(0, 0) :: step(0, 1) :: step(0, 2) :: step(9, 1) :: step(9, 2)
#endif

proctype Asking(byte a)
{
end:
  do
  ON_EACH_CONNECTION(ask)
  ON_EACH_NODE(answer)
  ON_EACH_QUORUM(succeed)
  :: lapse()
  od
}

/* --- what befalls the nodes ------------------------------------------------------------------- */

#if NEWCOMER
inline appear()
{
  d_step {
    !appeared ->
    appeared = true;
    node[3].state = QUARANTINED;
#if RELAXED
    node[3].nameless = true;
#endif
    printf("an empty process appears at index 0\n")
  }
}
#endif

/* Nodes that are alike are numbered in the order in which they are struck. */
#define struck (LOSSES + RESTARTS - losses_left - restarts_left)
#if NEWCOMER
#define may_strike(p) (N.state != ABSENT && ((p) != 2 || struck))
#else
#define may_strike(p) ((p) <= struck)
#endif

inline lose(p)
{
  d_step {
    losses_left && may_strike(p) ->
    losses_left--;
    N.state = QUARANTINED;
    N.holder = 0; N.high = 0; N.floor = 0; N.floor_0 = 0; N.fenced_by = 0; N.fenced_for = 0;
#if RELAXED
    N.nameless = true;
#endif
    end_quarantine(p);
    renew_id(p);
    printf("node %d loses its data\n", p)
  }
}

inline restart(p)
{
  d_step {
    restarts_left && may_strike(p) ->
    restarts_left--;
    if :: N.state == VOTES -> N.state = RESTARTED :: else fi;
    end_quarantine(p);
    renew_id(p);
    printf("node %d restarts\n", p)
  }
}

proctype Faults()
{
end:
  do
  :: false
#if NEWCOMER
  :: appear()
#endif
#if LOSSES
  ON_EACH_NODE(lose)
#endif
#if RESTARTS
  ON_EACH_NODE(restart)
#endif
  od
}

/* --- a server gives a node its vote: fence, wait, restore ------------------------------------- */

#define G node[D.goal - 1]
#define has_goal (D.goal && D.goal != OUT)
#define may_begin (d == 0 || driver[(d -> d - 1 : 0)].goal)
#define is_outside(x) (node[x].state == QUARANTINED || node[x].state == RESTARTED)

inline start(p)
{
  d_step {
    D.goal == 0 && may_begin && is_outside(p) ->
    D.goal = p + 1;
    D.current = true;
    D.high = larger(N.high, N.reserved);
#if RELAXED
    N.nameless = false;
#endif
    printf("driver %d finds node %d\n", d, p);
#ifdef WAIT_BEFORE_FENCE
    begin_wait()
#else
    skip
#endif
  }
}

#ifdef ADOPT_ANY_FENCE
#define was_fenced_for(x, p) (node[x].floor_0 == N.reserved)
#else
#define was_fenced_for(x, p) (node[x].floor_0 == N.reserved && node[x].fenced_by == (p) + 1)
#endif
/* The fence is complete, by whichever server. */
inline adopt(p)
{
  d_step {
    index_of(p) == 0 && ((D.goal == 0 && may_begin) || (D.goal == p + 1 && D.current && D.reserved && !D.waits)) &&
    is_outside(p) && N.reserved && was_fenced_for(1, p) && was_fenced_for(2, p) ->
    D.goal = p + 1;
    D.current = true;
    D.read = 0;
    D.high = N.reserved;
    D.reserved = true;
    D.raised = bit(1) | bit(2);
    D.floor_0 = N.reserved;
    printf("driver %d finds the fence of node %d complete\n", d, p);
    begin_wait()
  }
}

#define indexes(nodes) (((nodes) | (nodes) >> 3) & 7)
#define is_two(nodes) (indexes(nodes) == 3 || indexes(nodes) == 5 || indexes(nodes) == 6)
#ifdef FENCE_ASKS_F
#define is_enough(nodes) (nodes)
#else
#define is_enough(nodes) is_two(nodes)
#endif
#define is_trusted(p) (N.state == VOTES || (N.state == RESTARTED && G.state == RESTARTED))
#define is_known_with(p) (index_of(p) == 0 -> (!(D.read & bit(1)) || agree(p, 1)) && (!(D.read & bit(2)) || agree(p, 2)) \
                                           : (!(D.read & bit(0)) || agree(0, p)) && (!(D.read & bit(3)) || agree(3, p)))

#ifdef RESERVED_COUNTS_AS_VOTED
#define floor_of_goal larger(G.floor, G.reserved)
#else
#define floor_of_goal G.floor
#endif
inline note_floor(p)
{
  if
  :: N.floor_0 > D.floor_0 -> D.floor_0 = N.floor_0; D.floor_0_for = N.fenced_for
  :: N.floor_0 && N.floor_0 == D.floor_0 && N.fenced_for != D.floor_0_for -> D.floor_0_for = 0
  :: else
  fi;
  if
  :: index_of(D.goal - 1) == 0 && N.floor_0 > floor_of_goal && N.fenced_for != D.goal -> D.superseded = true
  :: else
  fi
}

#if RELAXED
#define is_out(p) (D.out & bit(p))
#define may_be_out(p) (N.state == QUARANTINED)
/* It has no identity, so it cannot take the floor. */
#define is_exempt(p) N.nameless
/* The goal and the other peer are f + 1 that remember. This one takes the floor as well. */
inline read_out(p)
{
  d_step {
    has_goal && !D.reserved && index_of(p) != index_of(D.goal - 1) && G.state == RESTARTED && may_be_out(p) &&
    is_known_with(p) && !D.out && !(D.read & bit(p)) && !is_enough(D.read | D.raised) ->
    D.out = bit(p);
    if
    :: is_exempt(p) -> D.raised = bit(p)
    :: else ->
       D.read = D.read | bit(p);
       D.high = larger(D.high, N.high);
       note_floor(p)
    fi;
    printf("driver %d finds that node %d has no vote, and reads %d\n", d, p, N.high)
  }
}
#define READ_ANY_NODE ON_EACH_NODE(read_high) ON_EACH_NODE(read_out)
#else
#define is_out(p) false
#define READ_ANY_NODE ON_EACH_NODE(read_high)
#endif

inline read_high(p)
{
  d_step {
    has_goal && !D.reserved && index_of(p) != index_of(D.goal - 1) && is_trusted(p) && is_known_with(p) &&
    !is_out(p) && !(D.read & bit(p)) && !is_enough(D.read | D.raised) ->
    D.read = D.read | bit(p);
    D.high = larger(D.high, N.high);
    note_floor(p);
    printf("driver %d reads %d on node %d\n", d, N.high, p)
  }
}

#ifdef SUPERSEDED_DOES_NOT_WAIT
#define is_superseded false
#else
#define is_superseded (D.superseded && G.state == RESTARTED)
#endif
/* Another process had a fence at its index since it voted. So its proof does not spare the wait. */
inline demote()
{
  d_step {
    has_goal && !D.reserved && D.current && is_superseded ->
    G.state = QUARANTINED;
    end_quarantine(D.goal - 1);
    D.current = true;
    D.read = 0; D.raised = 0; D.superseded = false;
#if RELAXED
    D.out = 0;
#endif
    printf("driver %d finds that node %d was superseded\n", d, D.goal - 1)
  }
}

inline reserve()
{
  d_step {
    has_goal && !D.reserved && is_enough(D.read | D.raised) && D.current && !is_superseded && is_outside(D.goal - 1) && D.high + 1 > G.reserved ->
    D.high++;
    D.reserved = true;
    G.reserved = D.high;
    printf("driver %d reserves %d on node %d\n", d, D.high, D.goal - 1)
  }
}

inline raise_floor(p)
{
  d_step {
    has_goal && D.reserved && (D.read & bit(p)) && !(D.raised & bit(p)) && (is_trusted(p) || is_out(p)) && N.high < D.high ->
    D.raised = D.raised | bit(p);
    N.high = D.high;
    if :: index_of(D.goal - 1) == 0 -> N.floor_0 = D.high; N.fenced_by = (D.current -> D.goal : 0); N.fenced_for = D.goal :: else fi;
    printf("driver %d raises the floor on node %d to %d\n", d, p, D.high);
#ifndef FENCE_KEEPS_ADMISSIONS
    if :: N.state == VOTES -> renew_id(p) :: else fi;
#endif
    if
#ifndef WAIT_BEFORE_FENCE
    :: is_enough(D.raised) -> begin_wait()
#endif
    :: else
    fi
  }
}

#ifdef NO_WAIT
#define must_wait(p) false
#else
#define must_wait(p) (N.state == QUARANTINED)
#endif
#ifdef RESTORE_IN_ANY_QUARANTINE
#define is_in_quarantine(p) is_outside(p)
#else
#define is_in_quarantine(p) (is_outside(p) && D.current && N.reserved == D.high)
#endif
inline restore_vote(p)
{
  d_step {
    D.goal == p + 1 && D.reserved && is_enough(D.raised) && D.waits && is_in_quarantine(p) && (!must_wait(p) || is_over) ->
    printf("driver %d: node %d votes, with floor %d\n", d, p, D.high);
    if :: must_wait(p) -> end_wait() :: else fi;
#ifndef RESTART_ENDS_HOLDS
    if :: must_wait(p) -> N.holder = 0 :: else fi;
#else
    N.holder = 0;
#endif
    N.state = VOTES;
    N.floor = D.high;
    N.high = larger(N.high, D.high);
    if
    :: index_of(p) && D.floor_0 > N.floor_0 -> N.floor_0 = D.floor_0; N.fenced_for = D.floor_0_for
    :: else
    fi;
    end_quarantine(p);
    leave(d);
    renew_id(p)
  }
}

proctype Driving(byte d)
{
end:
  do
  :: atomic {
       if ON_EACH_NODE(start) fi;
end_in_vain:
       if READ_ANY_NODE fi
     }
  :: adopt(0)
#if NEWCOMER
  :: adopt(3)
#endif
  READ_ANY_NODE
  :: demote()
  :: reserve()
  ON_EACH_NODE(raise_floor)
  ON_EACH_NODE(restore_vote)
  od
}

/* --- how it begins ---------------------------------------------------------------------------- */

init {
  atomic {
#if OLD_IS_OUT == 2
    node[0].state = RESTARTED; node[0].reserved = 1;
#elif OLD_IS_OUT
    node[0].state = QUARANTINED;
#else
    node[0].state = VOTES;
#endif
    node[1].state = VOTES; node[2].state = VOTES;
    run Asking(0); run Asking(1);
#if LEASES > 2
    run Asking(2);
#endif
    run Faults();
    run Driving(0);
#if DRIVERS > 1
    run Driving(1);
#endif
#if DRIVERS > 2
    run Driving(2);
#endif
  }
}
