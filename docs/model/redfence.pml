/*
 * How redfence grants tokens, and how a node that forgot comes back: everything that can happen, in every order, at small size.
 *
 * The argument is in locking/redlock.py and rejoin.py; this is there to refute it. Three places, so a quorum is two; one resource. Every step below is
 * atomic, and any step that is enabled may be the next. So a server that pauses or dies is one whose steps do not come, a lost message is a
 * step that never comes, and a late one comes late. There is no clock: a hold may end at any moment.
 *
 * The invariants are assertions at the steps that could break them:
 *   unique   (T1)  no two grants of different leases have the same token
 *   ordered  (T2)  a grant is greater than every grant of another lease that was given before its attempt began
 *   kept     (K)   no undo takes a hold that another attempt was told of, if that one has not given up
 *
 * Every #ifdef but GOAL and SEEN_n is a mutant: one rule is left out, and the checker must find a violation. README.md beside this file tells which
 * sizes are checked, what is left out, and how to run it.
 */

/* --- size ------------------------------------------------------------------------------------------------------------------------- */

#ifndef ATTEMPTS
#define ATTEMPTS 2     /* 2 or 3 */
#endif
#ifndef RETRIES
#define RETRIES 0      /* 1: an attempt is for the same lease as an earlier one */
#endif
#ifndef UNDO
#define UNDO 0         /* 1: attempts give up and undo. To tokens that is only an early end of a hold, so it is there for K alone */
#endif
#ifndef AHEAD
#define AHEAD 0        /* the greatest number on a node before we begin: of attempts that came to nothing */
#endif
#ifndef EVICTION
#define EVICTION 0     /* 1: idle counters are dropped, and other resources may have used numbers before we begin */
#endif
#ifndef WIPES
#define WIPES 0        /* how often a node forgets everything */
#endif
#ifndef REVERTS
#define REVERTS 0      /* how often a node falls back to an older state */
#endif
#ifndef RELICS
#define RELICS 0       /* 1: and the clock with it, so that in that state a hold of long ago is alive */
#endif
#ifndef DRIVERS
#define DRIVERS 0      /* how often a server sets about bringing a node back: all at once or in turn, and each may stop anywhere */
#endif
#ifndef JUMP
#define JUMP 8         /* 2^20 in the product: past every number in flight. 1 is past none of them: the floor is above what is known, no more */
#endif
#ifndef REPLACEMENT
#define REPLACEMENT 0  /* 1: place 0 is to be taken by a new node. The old one lives on, and servers may be connected to either */
#endif

#ifndef COPY
#define COPY 0         /* 1: the new node at place 0 is a copy of the old one, and shows proof that it lost nothing */
#endif
#ifndef RESTARTS
#define RESTARTS 0     /* how often a node restarts with proof that it lost nothing */
#endif

#ifndef POWER_LOSS
#define POWER_LOSS 0   /* 1: all nodes restart at once, with proof. With COPY, node 0 is spared and its copy starts */
#endif

#ifndef UNPROVEN
#define UNPROVEN 0     /* how often a node restarts without proof, although it lost nothing */
#endif

#ifndef RELAXED
#define RELAXED 0      /* 1: one trusted peer suffices for a node with proof, if the other peer was examined and has no vote */
#endif

#define FINDS (RETRIES || RELICS)    /* an attempt may find a hold of its own lease */
#define PROCESSES (3 + REPLACEMENT)
#define place(p)  ((p) % 3)          /* node 3 is the new one at place 0 */
#define bit(p)    (1 << (p))
#define larger(x, y) ((x) > (y) -> (x) : (y))

/* --- state ------------------------------------------------------------------------------------------------------------------------ */

typedef Node {
  byte holder;    /* nonce of the hold: its attempt, counted from 1; beyond these, an attempt of long ago; 0 if the lock is free */
#if FINDS
  bool shared;
  byte token;
#endif
  byte counter;   /* 0 if it was dropped */
  byte high;
  byte floor;
#if REPLACEMENT
  byte floor_0;   /* `floor:0`: the least floor that a node must have to vote at place 0 */
  byte read_0;    /* `floor:0` when the present admission id was given: whoever is admitted here has read no less */
#endif
  bool ready;     /* else it is in quarantine: no script of the algorithm runs there */
#if COPY || RESTARTS || POWER_LOSS
  bool proven;    /* and there because it restarted, with proof that it lost nothing */
#endif
#if RELAXED && WIPES
  byte loss;      /* the node was wiped and has no vote since: NAMELESS until a server gives it an identity, then NAMED */
#endif
};
Node node[PROCESSES];

typedef Attempt {
  byte lease;
  bool begun;
#if UNDO
  bool over;      /* given up */
#endif
  byte above;     /* the greatest token of another lease that was granted before this attempt began */
  byte admitted;  /* the nodes whose admission id is still the one that the attempt began under */
  byte stands[PROCESSES];  /* the number that the node minted or showed for it, or the token that it committed; 0: not yet minted */
  byte nonce[PROCESSES];   /* of the hold that the node answered with */
  byte target;    /* the greatest token that it has asked a node to commit; 0: none */
  byte token;     /* granted */
};
Attempt attempt[ATTEMPTS];

#define PAST 255  /* in `stands`: whatever the attempt has still under way to this node changes nothing */

#if DRIVERS
typedef Driver {
  byte goal;      /* the node it brings back, counted from 1; 0: not begun; OUT: done, or to be started over as another driver */
  bool current;   /* the node is still in the quarantine in which the driver found it */
  byte read;      /* the nodes whose admission id is still the one that they were read under */
  byte raised;
#if RELAXED
  byte out;       /* the peer that was examined and has no vote */
#endif
  byte high;      /* the greatest that was read */
#if REPLACEMENT
  byte floor_0;
#endif
};
Driver driver[DRIVERS];
#define OUT 255
#endif

byte wipes_left = WIPES, reverts_left = REVERTS;
#ifdef GOAL
byte returns;
bool with_the_out;  /* a fence stood on a peer without a vote */
#endif

hidden byte i, j, k;                               /* for loops within a step */
hidden byte unique = 1, ordered = 1, kept = 1;     /* told by name when one fails */

#if COPY || RESTARTS || POWER_LOSS
#define proven(x) node[x].proven
#else
#define proven(x) false
#endif
#if COPY
bool copied;
#endif
#if POWER_LOSS
bool lost_power;
#endif
#if RELAXED && WIPES
#define NAMELESS 1
#define NAMED    2
#define is_nameless(p) (node[p].loss == NAMELESS)
#else
#define is_nameless(p) false
#endif
byte restarts_left = RESTARTS, unproven_left = UNPROVEN;

#define A attempt[a]
#define N node[p]
#define D driver[d]
#if RELICS
#define lease_of(nonce) ((nonce) > ATTEMPTS -> (nonce) - ATTEMPTS : attempt[(nonce) - 1].lease)
#else
#define lease_of(nonce) attempt[(nonce) - 1].lease
#endif
#define predecessor(x) ((x) -> (x) - 1 : 0)

/* --- what keeps the states few, and loses none that matters ---------------------------------------------------------------------- */

#if UNDO
#define over(x) attempt[x].over
#else
#define over(x) false
#endif
#define settled(x) (over(x) || attempt[x].token)
/* What a settled attempt may still ask nodes to commit: 0 if nothing. */
#define last_word(x) (attempt[x].token -> attempt[x].token : attempt[x].target)

#ifdef COMMIT_UNDER_ANY_ADMISSION
#define may_reach(x, p) node[p].ready
#else
#define may_reach(x, p) (attempt[x].admitted & bit(p))
#endif

inline free(x)
{
  node[x].holder = 0;
#if FINDS
  node[x].shared = 0; node[x].token = 0;
#endif
  skip
}

/* Part of every step: what is of no use to anybody any more is forgotten. */
inline tidy()
{
  d_step {
  for (i : 0 .. ATTEMPTS - 1) {
    for (j : 0 .. PROCESSES - 1) {
      /* A commit counts only in the hold that was found, and under the admission it was found under. Neither ever comes again. */
      if :: attempt[i].nonce[j] != node[j].holder || (!UNDO && !may_reach(i, j)) -> attempt[i].nonce[j] = 0 :: else fi;
      /* Commits are all that a settled attempt has under way to where it minted. */
      if
      :: settled(i) && attempt[i].stands[j] && (!attempt[i].nonce[j] || (!UNDO && attempt[i].stands[j] >= last_word(i))) ->
         attempt[i].stands[j] = PAST; attempt[i].nonce[j] = 0
      :: else
      fi };
    if :: settled(i) -> attempt[i].above = 0 :: else fi };
  /* A hold into which nobody can commit and which nobody can share may as well end: it is allowed to at any moment. */
  for (j : 0 .. PROCESSES - 1) {
    k = UNDO || node[j].holder == 0;
    for (i : 0 .. ATTEMPTS - 1) {
      k = (k || attempt[i].nonce[j] == node[j].holder ||
           (FINDS && attempt[i].lease == lease_of(node[j].holder) && attempt[i].stands[j] == 0)) };
    if :: k -> skip :: else -> free(j) fi };
  skip
  }
}

/* --- admission ids ---------------------------------------------------------------------------------------------------------------- */

#if DRIVERS
inline leave(x)
{
  driver[x].goal = OUT; driver[x].current = false; driver[x].read = 0; driver[x].raised = 0; driver[x].high = 0;
#if REPLACEMENT
  driver[x].floor_0 = 0;
#endif
#if RELAXED
  driver[x].out = 0;
#endif
  skip
}
#endif

/* A node gets a new random admission id. Everything that was sent under the old one is void. */
inline renew_admission(p)
{
  for (i : 0 .. ATTEMPTS - 1) { attempt[i].admitted = attempt[i].admitted & ~bit(p) };
#if DRIVERS
  for (i : 0 .. DRIVERS - 1) {
#ifndef FENCE_UNDER_ANY_ADMISSION
    if
    :: (driver[i].read & bit(p)) && !(driver[i].raised & bit(p)) -> leave(i)  /* it cannot raise the floor there, and starts over */
    :: else -> driver[i].read = driver[i].read & ~bit(p)
    fi
#else
    skip
#endif
   };
#endif
#if REPLACEMENT
  N.read_0 = N.floor_0;
#endif
  skip
}

/* --- a server tries to grant one lease ---------------------------------------------------------------------------------------------- */

/* With the nodes to which its server is admitted. A node that is missing here is one whose answers do not come. */
inline begin_there()
{
  A.begun = true;
  for (i : 0 .. ATTEMPTS - 1) {
    if :: attempt[i].lease != A.lease -> A.above = larger(A.above, attempt[i].token) :: else fi }
}

/* The attempts are alike, so let them begin in their order. */
#define may_begin (!A.begun && (a == 0 || attempt[predecessor(a)].begun))
#define if_ready(p) (node[p].ready -> bit(p) : 0)

#if REPLACEMENT
/*
 * At place 0 a server is connected to one process, and has not yet learnt that it is of the past: its floor is no less than any
 * `floor:0` that the server has read. With each of the two others it is either admitted under the present id, and has read `floor:0` there, or
 * it is not. So these are all the connections that a server can have, whenever it looked at each node; smaller sets are the same
 * with answers that do not come.
 */
#define agree(x, p) (node[x].floor >= node[p].read_0)
#define if_they_agree(x, p) (node[p].ready && agree(x, p) -> bit(p) : 0)
inline begin_at(x)
{
  d_step {
    may_begin && node[x].ready ->
    A.admitted = bit(x) | if_they_agree(x, 1) | if_they_agree(x, 2);
    begin_there();
    printf("attempt %d begins, at place 0 with node %d\n", a, x)
  }
}
#define if_alone(p) 0
#define agrees_with_all(x) (node[x].ready && agree(x, 1) && agree(x, 2))
#define is_better_connected (agrees_with_all(0) || agrees_with_all(3))
#else
#define if_alone(p) if_ready(p)
#define is_better_connected false
#endif

inline begin()
{
  d_step {
    may_begin && !is_better_connected ->
    A.admitted = if_alone(0) | if_ready(1) | if_ready(2);
    begin_there();
    printf("attempt %d begins\n", a)
  }
}

#ifdef COUNTER_FROM_ZERO
#define last_number(p) N.counter
#else
#define last_number(p) (N.counter -> N.counter : N.high)
#endif
#ifdef MINT_WITHOUT_FLOOR
#define next_number(p) (last_number(p) + 1)
#else
#define next_number(p) (larger(last_number(p), N.floor) + 1)
#endif
#ifdef FIND_RELICS
#define is_relic(p) false
#else
/* A hold from before the node came back: it has a number that others may have been granted since, and counts as ended. */
#define is_relic(p) (N.token <= N.floor)
#endif
#define own_lease_holds(p) (N.holder && lease_of(N.holder) == A.lease)
#if FINDS
#define is_repeat(p) (own_lease_holds(p) && !is_relic(p))
#else
#define is_repeat(p) false
#endif
#define may_mint(p) (A.begun && (A.admitted & bit(p)) && A.stands[p] == 0)

/* The lock is free; or another lease holds it, which expires first, or is ended by this very step: a handover. */
inline mint(p)
{
  d_step {
    may_mint(p) && !is_repeat(p) ->
    N.counter = next_number(p);
    N.high = larger(N.high, N.counter);
    N.holder = a + 1;
#if FINDS
    N.shared = false; N.token = N.counter;
#endif
    A.stands[p] = N.counter;
    A.nonce[p] = N.holder;
    printf("attempt %d mints %d on node %d\n", a, N.counter, p)
  }
}

/* The very lease holds the lock, by an earlier attempt: its number and its nonce are told. */
inline find(p)
{
  d_step {
    may_mint(p) && is_repeat(p) ->
    N.shared = true;
    A.stands[p] = N.token;
    A.nonce[p] = N.holder;
    printf("attempt %d finds %d on node %d, by attempt %d\n", a, N.token, p, N.holder - 1)
  }
}

#ifdef UNCONDITIONAL_COMMIT
#define may_count(p) true
#elif defined(COMMIT_WITHOUT_NONCE)
#define may_count(p) own_lease_holds(p)
#else
#define may_count(p) (A.nonce[p] && A.nonce[p] == N.holder)
#endif

/* A commit that is refused changes nothing and the attempt does not count the node, so only those that count are steps. */
inline commit_k(p)
{
  A.stands[p] = k;
#if FINDS
  if :: N.holder -> N.token = larger(N.token, k) :: else fi;
#endif
  N.counter = larger(last_number(p), k);
  N.high = larger(N.high, k);
  printf("node %d commits %d for attempt %d\n", p, k, a)
}
#define can_commit(p, number) (A.stands[p] && A.stands[p] < (number) && may_reach(a, p) && may_count(p))

/*
 * The answers of p and q have been heard, and q's number is the greater one. That an answer was heard has no other effect, so it need not be a
 * step of its own; nor need the answer to a commit.
 */
inline commit(p, q)
{
  d_step {
    !over(a) && A.stands[q] != PAST && (!A.token || A.stands[q] <= A.token) && can_commit(p, A.stands[q]) ->
    if :: !A.token -> A.target = larger(A.target, A.stands[q]) :: else fi;
    k = A.stands[q];
    commit_k(p)
  }
}

inline commit_late(p)
{
  d_step {
    settled(a) && can_commit(p, last_word(a)) ->
    k = last_word(a);
    commit_k(p)
  }
}

#ifdef MAX_WITHOUT_COMMIT
#define is_quorum(p, q) (A.stands[p] && A.stands[q])
#else
/* Both stand at one number: they minted it (the fast path), or have committed the greatest that was asked for. */
#define is_quorum(p, q) (A.stands[p] && A.stands[p] == A.stands[q] && (!A.target || A.stands[p] == A.target))
#endif

/*
 * Grants that must be possible, or what else is found proves nothing. With GOAL set to one of these, the checker has to find it. With SEEN_1 to
 * SEEN_3 set, a whole search prints which of them it has met. `told` is no part of a state.
 */
#define tell(goal) if :: (goal) -> c_code { static int told; if (!told) { told = 1; printf("seen: %s\n", #goal); } } :: else fi
#define FAST_PATH (A.target == 0)
#define COMMITTED (A.target != 0)
#define AFTER_ANOTHER (A.above > 0)
#define SAME_TOKEN_AGAIN (a > 0 && attempt[0].lease == A.lease && attempt[0].token == k)
#define ON_A_NODE_THAT_CAME_BACK (N.floor && A.stands[p] > N.floor)
#define AFTER_A_SECOND_RETURN (ON_A_NODE_THAT_CAME_BACK && returns == 2)
#define AFTER_A_FENCE_ON_THE_OUT (ON_A_NODE_THAT_CAME_BACK && returns == 1 && with_the_out)
#define ON_TWO_NODES_THAT_CAME_BACK (node[0].floor && node[1].floor && A.stands[0] && A.stands[1])
#define ON_THE_OLD_NODE (p == 0 && node[3].ready)
#define ON_THE_NEW_NODE (p == 3)

inline grant(p, q)
{
  d_step {
    !settled(a) && is_quorum(p, q) ->
    k = larger(A.stands[p], A.stands[q]);
    printf("attempt %d is granted %d\n", a, k);
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
    for (i : 0 .. ATTEMPTS - 1) { unique = unique && (attempt[i].lease == A.lease || attempt[i].token != k) };
    ordered = k > A.above;
#ifndef GOAL
    assert(unique); assert(ordered);
#endif
    A.token = k;
    A.target = 0
  }
}

#if UNDO
#ifdef UNDO_BY_LEASE
#define may_undo(p) own_lease_holds(p)
#elif defined(UNDO_OF_A_SHARED_HOLD)
#define may_undo(p) (N.holder == a + 1)
#else
#define may_undo(p) (N.holder == a + 1 && !N.shared)
#endif
inline undo(p)
{
  d_step {
    A.begun && !A.token && may_undo(p) ->
    A.over = true;
    printf("attempt %d undoes the hold of attempt %d on node %d\n", a, N.holder - 1, p);
    for (i : 0 .. ATTEMPTS - 1) {
      kept = kept && (i == a || over(i) || !attempt[i].stands[p] || attempt[i].nonce[p] != N.holder) };
#ifndef GOAL
    assert(kept);
#endif
    free(p)
  }
}
#endif

#if REPLACEMENT
#define ON_EACH_NODE(step) :: step(0) :: step(1) :: step(2) :: step(3)
#define ON_EACH_QUORUM(step) :: step(0, 1) :: step(0, 2) :: step(1, 2) :: step(3, 1) :: step(3, 2)
#define ON_EACH_PAIR(step) ON_EACH_QUORUM(step) :: step(1, 0) :: step(2, 0) :: step(2, 1) :: step(1, 3) :: step(2, 3)
#else
#define ON_EACH_NODE(step) :: step(0) :: step(1) :: step(2)
#define ON_EACH_QUORUM(step) :: step(0, 1) :: step(0, 2) :: step(1, 2)
#define ON_EACH_PAIR(step) ON_EACH_QUORUM(step) :: step(1, 0) :: step(2, 0) :: step(2, 1)
#endif

#if FINDS
#define MINT_ON_ANY_NODE ON_EACH_NODE(mint) ON_EACH_NODE(find)
#else
#define MINT_ON_ANY_NODE ON_EACH_NODE(mint)
#endif

proctype Attempting(byte a)
{
end:
  do
  :: atomic {
       if
       :: /* It may begin when it first mints: what came in between could only take admissions from it, and ask less of its token. */
          if
          :: begin()
#if REPLACEMENT
          :: begin_at(0) :: begin_at(3)
#endif
          fi;
end_in_vain:
          if MINT_ON_ANY_NODE fi
       MINT_ON_ANY_NODE
       ON_EACH_PAIR(commit)
       ON_EACH_NODE(commit_late)
       ON_EACH_QUORUM(grant)
#if UNDO
       ON_EACH_NODE(undo)
#endif
       fi;
       tidy()
     }
  od
}

/* --- what befalls the nodes --------------------------------------------------------------------------------------------------------- */

/*
 * A hold that nobody mints after only refuses commits when it ends, and a commit that is refused is like one that does not come. So the end of a
 * hold is part of the next mint, of another lease; and a step of its own only where its own lease may come to the node again.
 */
#define may_come(x, p) (attempt[x].lease == lease_of(N.holder) && !attempt[x].stands[p])
#if ATTEMPTS == 2
#define may_meet_its_lease(p) (may_come(0, p) || may_come(1, p))
#else
#define may_meet_its_lease(p) (may_come(0, p) || may_come(1, p) || may_come(2, p))
#endif
inline expire(p)
{
  d_step {
    N.holder && may_meet_its_lease(p) ->
    free(p);
    printf("the hold on node %d expires\n", p)
  }
}

/* Where a counter equals `high` the next number is the same without it. */
#ifdef COUNTER_FROM_ZERO
#define is_droppable(p) N.counter
#else
#define is_droppable(p) (N.counter && N.counter < N.high)
#endif
inline drop_counter(p)
{
  d_step {
    is_droppable(p) ->
    N.counter = 0;
    printf("node %d drops the counter\n", p)
  }
}

/*
 * The node restarts with less than it had. Every server notices that (admission is judged on every new connection), and the first one gives it a
 * quarantine id in the same step here, for nothing else can happen to the node in between.
 */
inline forget(p)
{
  N.high = 0; N.floor = 0;
#if REPLACEMENT
  N.floor_0 = 0;
#endif
#ifndef VOTE_BEFORE_FENCE
  N.ready = false;
#endif
#if COPY || RESTARTS || POWER_LOSS
  N.proven = false;
#endif
  end_quarantine(p)
}

/* Whatever quarantine a driver has found, the node is not in it any more. */
inline end_quarantine(p)
{
  renew_admission(p);
#if DRIVERS
  for (i : 0 .. DRIVERS - 1) { if :: driver[i].goal == p + 1 -> driver[i].current = false :: else fi };
#endif
  skip
}

/* Nodes that are alike are numbered in the order in which they forget. With a replacement those at place 0 are not like the others. */
#define forgotten (WIPES + REVERTS + RESTARTS + UNPROVEN - wipes_left - reverts_left - restarts_left - unproven_left)
#if REPLACEMENT
#define may_forget(p) ((p) != 2 || forgotten)
#else
#define may_forget(p) ((p) <= forgotten)
#endif

#if COPY
#define may_restart(p) ((p) == 1)  /* a new run at place 0 is what the copy is */
#else
#define may_restart(p) may_forget(p)
#endif
inline begin_run(p)
{
  if :: N.ready -> N.ready = false; N.proven = true :: else fi;
  end_quarantine(p);
  printf("node %d restarts\n", p)
}
inline restart(p)
{
  d_step {
    restarts_left && may_restart(p) ->
    restarts_left--;
    begin_run(p)
  }
}
#if COPY
#define may_restart_unproven(p) ((p) == 2)
#else
#define may_restart_unproven(p) may_forget(p)
#endif
/* No server knows that it kept everything. */
inline restart_unproven(p)
{
  d_step {
    unproven_left && may_restart_unproven(p) ->
    unproven_left--;
    begin_run(p);
#if COPY || RESTARTS || POWER_LOSS
    N.proven = false;
#endif
    printf("and node %d has no proof\n", p)
  }
}
#if POWER_LOSS
inline lose_power()
{
  d_step {
    !lost_power ->
    lost_power = true;
#if COPY
    make_copy();
#else
    begin_run(0);
#endif
    begin_run(1);
    begin_run(2)
  }
}
#endif

#if COPY
/* Its holds are left out: nobody can commit into them, and their numbers are no greater than its floor will be. */
inline make_copy()
{
  copied = true;
  node[3].counter = node[0].counter; node[3].high = node[0].high; node[3].floor = node[0].floor;
#ifdef NO_FENCE_FOR_A_DURABLE_RESTART
  node[3].ready = true;
#else
  node[3].proven = true;
#endif
  printf("a copy of node 0 starts as node 3\n")
}
/*
 * What goes beyond: a copy counts until it has passed its fence and votes, and a wiped node until it votes. The old process at place 0
 * lives on.
 */
#if !RELAXED || !WIPES || defined(TWO_FAULTS_AT_A_TIME)
#define is_only_fault true
#else
#define is_only_fault ((!copied || node[3].ready) && !node[1].loss)
#endif
inline copy() { d_step { !copied && node[0].ready && is_only_fault -> make_copy() } }
#endif

#if COPY && RELAXED
#define may_wipe(p) ((p) == 1 && is_only_fault)
#else
#define may_wipe(p) may_forget(p)
#endif
inline wipe(p)
{
  d_step {
    wipes_left && may_wipe(p) ->
    wipes_left--;
#if RELAXED
    N.loss = NAMELESS;
#endif
    free(p); N.counter = 0;
    printf("node %d is wiped\n", p);
    forget(p)
  }
}

/* `high` and `floor` of that state do no harm: the fence sets both anew. So it is counter and hold that matter. */
inline revert(p, number)
{
  d_step {
    reverts_left && may_forget(p) && N.counter > number ->
    reverts_left--;
    N.counter = number;
    printf("node %d falls back to counter %d\n", p, number);
    forget(p)
  }
}
inline revert_to_1(p) { revert(p, 1) }
inline revert_to_2(p) { revert(p, 2) }

inline revert_to_hold(p, lease_held)
{
  d_step {
    reverts_left && may_forget(p) && N.counter > 1 ->
    reverts_left--;
    N.counter = 1;
    N.holder = ATTEMPTS + lease_held; N.token = 1; N.shared = false;
    printf("node %d falls back to number 1, held by lease %d\n", p, lease_held);
    forget(p)
  }
}
inline revert_to_hold_of_1(p) { revert_to_hold(p, 1) }
inline revert_to_hold_of_2(p) { revert_to_hold(p, 2) }

proctype Faults()
{
end:
  do
  :: atomic {
       if
       :: false
#if FINDS
       ON_EACH_NODE(expire)
#endif
#if EVICTION
       ON_EACH_NODE(drop_counter)
#endif
#if WIPES
       ON_EACH_NODE(wipe)
#endif
#if REVERTS
       ON_EACH_NODE(revert_to_1)
       ON_EACH_NODE(revert_to_2)
#if RELICS
       ON_EACH_NODE(revert_to_hold_of_1)
       ON_EACH_NODE(revert_to_hold_of_2)
#endif
#endif
#if RESTARTS
       ON_EACH_NODE(restart)
#endif
#if UNPROVEN
       ON_EACH_NODE(restart_unproven)
#endif
#if POWER_LOSS
       :: lose_power()
#elif COPY
       :: copy()
#endif
       fi;
       tidy()
     }
  od
}

/* --- a server brings a node back ------------------------------------------------------------------------------------------------------ */

#if DRIVERS
#if COPY
#define is_there(p) (p != 3 || copied)
#else
#define is_there(p) true
#endif
#if COPY && UNPROVEN
/* Driver 0 is for the node without proof, 1 for the copy, 2 for the node that was wiped. */
#define may_drive(p) (p == (d == 0 -> 2 : (d == 1 -> 3 : 1)))
#elif COPY && RESTARTS
/* One for each node: several for one node are the matter of other sizes. */
#define may_drive(p) (p == (d -> 3 : 1))
#else
#define may_drive(p) (d == 0 || driver[predecessor(d)].goal)
#endif
/* A driver that starts over is another driver. They are alike, so let them begin in their order. */
inline start(p)
{
  d_step {
    D.goal == 0 && may_drive(p) && !N.ready && is_there(p) ->
    D.goal = p + 1;
    D.current = true;
    D.high = N.high;
#if RELAXED && WIPES
    if :: is_nameless(p) -> N.loss = NAMED :: else fi;
#endif
    printf("driver %d finds node %d in quarantine\n", d, p)
  }
}

#define is_other(p) (D.goal && D.goal != OUT && place(p) != place(D.goal - 1))
#define places(nodes) (((nodes) | (nodes) >> 3) & 7)
#define is_two(nodes) (places(nodes) == 3 || places(nodes) == 5 || places(nodes) == 6)
#ifdef FENCE_READS_F
#define is_enough(nodes) (nodes)
#else
#define is_enough(nodes) is_two(nodes)
#endif
#if REPLACEMENT
/* What the driver has read and p are nodes of one server. */
#define is_known_with(p) ((p) == 0 || (p) == 3 -> (!(D.read & bit(1)) || agree(p, 1)) && (!(D.read & bit(2)) || agree(p, 2)) \
                                               : (!(D.read & bit(0)) || agree(0, p)) && (!(D.read & bit(3)) || agree(3, p)))
#else
#define is_known_with(p) true
#endif

#ifdef FORGETFUL_READS_RESTARTED
#define is_trusted(p) (N.ready || N.proven)
#else
#define is_trusted(p) (N.ready || (proven(p) && proven(D.goal - 1)))
#endif
#if RELAXED
#define has_raised (D.raised & ~D.out)
#define is_out(p) (D.out & bit(p))
#else
#define has_raised D.raised
#define is_out(p) false
#endif
inline read_high(p)
{
  d_step {
    is_other(p) && is_trusted(p) && is_known_with(p) && !has_raised && !is_out(p) && !(D.read & bit(p)) && !is_enough(D.read) ->
    D.read = D.read | bit(p);
    D.high = larger(D.high, N.high);
#if REPLACEMENT
    D.floor_0 = larger(D.floor_0, N.floor_0);
#endif
    printf("driver %d reads %d on node %d\n", d, N.high, p)
  }
}

#if RELAXED
#ifdef RELAXED_WITH_AN_UNSEEN_PEER
#define may_be_out(p) true
#define is_exempt(p) true
#else
#define may_be_out(p) (!N.ready && !N.proven)
#ifdef RELAXED_SPARES_THE_OUT
#define is_exempt(p) true
#else
#define is_exempt(p) is_nameless(p)
#endif
#endif
/* The goal and the other peer are f + 1 that remember. This one takes the floor as well, in its quarantine. */
inline read_out(p)
{
  d_step {
    is_other(p) && proven(D.goal - 1) && may_be_out(p) && is_known_with(p) && !D.out && !D.raised && !(D.read & bit(p)) && !is_enough(D.read) ->
    D.out = bit(p);
    if
    :: is_exempt(p) -> D.raised = bit(p)
    :: else ->
       D.read = D.read | bit(p);
       D.high = larger(D.high, N.high);
#if REPLACEMENT
       D.floor_0 = larger(D.floor_0, N.floor_0)
#endif
    fi;
    printf("driver %d finds that node %d has no vote, and reads %d\n", d, p, N.high)
  }
}
#endif

#define new_floor (D.high + JUMP)
#ifdef FENCE_BLINDLY
#define is_above(p) true
#else
#define is_above(p) (N.high < new_floor)
#endif
inline raise_floor(p)
{
  d_step {
    (D.read & bit(p)) && (is_trusted(p) || is_out(p)) && !(D.raised & bit(p)) && is_enough(D.read | D.raised) && is_above(p) ->
    D.raised = D.raised | bit(p);
#ifndef FENCE_KEEPS_HIGH
    N.high = larger(N.high, new_floor);
#endif
#if REPLACEMENT
    if :: place(D.goal - 1) == 0 -> N.floor_0 = new_floor :: else fi;
#endif
#ifndef FENCE_KEEPS_ADMISSIONS
    if :: N.ready -> renew_admission(p) :: else fi;
#endif
    printf("driver %d raises the floor on node %d to %d\n", d, p, new_floor)
  }
}

#ifdef RESTORE_IN_ANY_QUARANTINE
#define is_in_quarantine !N.ready
#else
#define is_in_quarantine (!N.ready && D.current)
#endif
inline restore_vote(p)
{
  d_step {
    D.goal == p + 1 && is_enough(D.raised) && is_in_quarantine ->
    N.high = larger(N.high, new_floor);
#ifndef MINT_WITHOUT_FLOOR
    N.floor = new_floor;
#endif
#if REPLACEMENT && !defined(RESTORE_WITHOUT_KNOWN_FLOORS)
    N.floor_0 = (place(p) -> larger(N.floor_0, D.floor_0) : 0);
#endif
    N.ready = true;
#if COPY || RESTARTS || POWER_LOSS
    N.proven = false;
#endif
#if RELAXED && WIPES
    N.loss = 0;
#endif
    printf("driver %d: node %d votes again, from %d\n", d, p, new_floor);
#ifdef GOAL
    returns++;
#if RELAXED
    with_the_out = with_the_out || D.out;
#endif
#endif
    end_quarantine(p);
#ifdef RESTORER_DOES_NOT_LOOK
    N.read_0 = D.floor_0;
#endif
    leave(d)
  }
}

#if RELAXED
#define READ_ANY_NODE ON_EACH_NODE(read_high) ON_EACH_NODE(read_out)
#else
#define READ_ANY_NODE ON_EACH_NODE(read_high)
#endif

proctype Driving(byte d)
{
end:
  do
  :: atomic {
       if
       :: if ON_EACH_NODE(start) fi;
end_in_vain:
          if READ_ANY_NODE fi
       READ_ANY_NODE
       ON_EACH_NODE(raise_floor)
       ON_EACH_NODE(restore_vote)
       fi;
       tidy()
     }
  od
}
#endif

/* --- how it begins -------------------------------------------------------------------------------------------------------------------- */

inline any_number(p)
{
  if :: N.counter = 0 :: AHEAD > 0 -> N.counter = 1 :: AHEAD > 1 -> N.counter = 2 fi;
  if :: N.high = N.counter :: EVICTION -> N.high = AHEAD + 1 fi
}

init {
  atomic {
    node[0].ready = true; node[1].ready = true; node[2].ready = true;
    any_number(0); any_number(1); any_number(2);
    attempt[0].lease = 1;
#if ATTEMPTS == 2
    attempt[1].lease = 2 - RETRIES;
#elif !RETRIES
    attempt[1].lease = 2; attempt[2].lease = 3;
#else
    if
    :: attempt[1].lease = 1; attempt[2].lease = 2
    :: attempt[1].lease = 2; attempt[2].lease = 1
    :: attempt[1].lease = 2; attempt[2].lease = 2
    fi;
#endif
    run Attempting(0); run Attempting(1);
#if ATTEMPTS > 2
    run Attempting(2);
#endif
    run Faults();
#if DRIVERS > 0
    run Driving(0);
#endif
#if DRIVERS > 1
    run Driving(1);
#endif
#if DRIVERS > 2
    run Driving(2);
#endif
  }
}
