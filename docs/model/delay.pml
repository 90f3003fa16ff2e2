/*
 * The lock delay: a lock that its holder lost stays closed for a time that the holder asked for.
 *
 * Three nodes hold one resource, so a quorum is two. There is no time, but there are ends:
 *   - a lease lapses when its holder stops to count on it;
 *   - the ttl of a hold ends on a node, never before the validity that the node answered for. The
 *     node keeps the hold, but it is closed now;
 *   - a closed hold ends, never before the delay of its lease is over. The delay begins when the
 *     lease lapses, or when an operator sends a forced release.
 *
 * Every message may be lost. Every step is atomic, and any enabled step may be next. The fence of
 * a node needs no rule of its own: ttl and delay together are within the greatest ttl, so a wait
 * outlasts both. membership.pml shows that a wait outlasts what a node answered for.
 *
 * The invariants are assertions at the steps that could break them:
 *   delayed  no lease is granted or renewed while another one is valid, or its delay runs
 *   final    a lease that was told LOST or FORCED is never renewed
 *   opened   a node to which a release or an undo came refuses no other lease because of it
 *
 * Every #ifdef but SEEN_n is a mutant: one rule is left out, and the checker must find a violation.
 * README.md tells more.
 */

#ifndef LEASES
#define LEASES 2
#endif

#define bit(p) (1 << (p))

typedef Node {
  byte holder;    /* the lease whose hold is here, counted from 1; 0: the lock is free */
  bool closed;    /* the ttl of the hold has ended here, or an operator has ended it */
};
Node node[3];

#define NEW       0
#define ASKS      1
#define VALID     2
#define DELAYED   3   /* it has lapsed, or an operator has ended it, and its delay runs */
#define OVER      4   /* so is its delay */
#define GIVEN_UP  5   /* the server undoes its mints */
#define RELEASED  6   /* its holder counts on it no more, and has said so */

typedef Lease {
  byte state;
  byte asked;     /* the nodes that the present request has reached */
  byte answered;  /* those that granted or renewed */
  byte refused;   /* those that refused the renewal */
  bool renewing;
  byte support;   /* the nodes that answered the request from which the validity comes */
  byte ended;     /* the nodes that have the release or the undo */
  bool forcing;   /* a forced release is on its way */
  byte forced;    /* the nodes that have it */
  bool told_lost; /* the holder, or the operator, has heard that the lease is lost */
};
Lease lease[LEASES];

hidden byte i;
hidden byte delayed, final, opened;

#define N node[p]
#define L lease[a]
#define other (N.holder - 1)
#define is_delayed(x) (lease[x].state == VALID || lease[x].state == DELAYED)
#define tell(goal) if :: (goal) -> c_code { static int told; if (!told) { told = 1; printf("seen: %s\n", #goal); } } :: else fi

#define AFTER_A_DELAY (lease[1 - a].state == OVER)
#define AFTER_A_RELEASE (lease[1 - a].state == RELEASED)
#define AFTER_A_FORCED_RELEASE (lease[1 - a].told_lost && lease[1 - a].forcing)

/* --- a holder acquires and renews ------------------------------------------------------------- */

inline take(p)
{
  N.holder = a + 1; N.closed = false; L.answered = L.answered | bit(p)
}

/* Leases are alike, so they are numbered in the order in which they begin. */
#define may_begin (a == 0 || lease[(a -> a - 1 : 0)].state != NEW)
inline mint(p)
{
  d_step {
    ((L.state == NEW && may_begin) || L.state == ASKS) && !(L.asked & bit(p)) ->
    L.state = ASKS;
    L.asked = L.asked | bit(p);
    if
    :: N.holder == 0 -> take(p); printf("node %d grants lease %d\n", p, a)
#ifdef MINT_IGNORES_THE_DELAY
    :: N.holder && N.closed -> take(p); printf("node %d grants lease %d\n", p, a)
    :: N.holder && !N.closed ->
#else
    :: else ->
#endif
       opened = !(lease[other].ended & bit(p));
       printf("node %d refuses lease %d for lease %d\n", p, a, other);
       assert(opened)
    fi
  }
}

inline check_delay()
{
  delayed = true;
  for (i : 0 .. LEASES - 1) { delayed = delayed && (i == a || !is_delayed(i)) };
#ifdef SEEN_1
  tell(SEEN_1);
#endif
#ifdef SEEN_2
  tell(SEEN_2);
#endif
#ifdef SEEN_3
  tell(SEEN_3);
#endif
  assert(delayed)
}

inline count_on_it()
{
  L.state = VALID; L.support = L.answered; L.answered = 0; L.asked = 0; L.refused = 0; L.renewing = false
}

inline succeed(p, q)
{
  d_step {
    (L.answered & bit(p)) && (L.answered & bit(q)) && (L.state == ASKS || L.renewing) ->
    if
    :: L.renewing -> printf("lease %d is renewed\n", a); final = !L.told_lost; assert(final)
    :: else -> printf("lease %d is granted\n", a)
    fi;
    check_delay();
    count_on_it()
  }
}

inline give_up()
{
  d_step {
    L.state == ASKS ->
    L.state = GIVEN_UP; L.answered = 0; L.asked = 0;
    printf("lease %d is given up\n", a)
  }
}

/* The holder may be late: it does not know that its lease has lapsed. */
inline begin_renewal()
{
  d_step {
    is_delayed(a) && !L.renewing ->
    L.renewing = true; L.asked = 0; L.answered = 0; L.refused = 0;
    printf("lease %d asks for a renewal\n", a)
  }
}

inline renew(p)
{
  d_step {
    L.renewing && !(L.asked & bit(p)) ->
    L.asked = L.asked | bit(p);
    if
#ifdef RENEWAL_REVIVES
    :: N.holder == a + 1 ->
#else
    :: N.holder == a + 1 && !N.closed ->
#endif
       take(p); printf("node %d renews lease %d\n", p, a)
    :: else -> L.refused = L.refused | bit(p); printf("node %d does not renew lease %d\n", p, a)
    fi
  }
}

inline lose(p, q)
{
  d_step {
    L.renewing && (L.refused & bit(p)) && (L.refused & bit(q)) ->
    L.renewing = false; L.answered = 0; L.asked = 0; L.refused = 0; L.told_lost = true;
    printf("lease %d is told lost\n", a)
  }
}

inline lapse()
{
  d_step { L.state == VALID -> L.state = DELAYED; printf("lease %d lapses\n", a) }
}

/* A renewal under way ends first. */
inline end_delay()
{
  d_step {
    L.state == DELAYED && !L.renewing -> L.state = OVER; L.support = 0;
    printf("the delay of lease %d is over\n", a)
  }
}

/* --- what a node does with time --------------------------------------------------------------- */

/* It answered after the request was sent. So the request gives no validity any more. */
inline drop_request(x, p)
{
  if
  :: (lease[x].answered & bit(p)) && lease[x].state == ASKS ->
     lease[x].state = GIVEN_UP; lease[x].answered = 0; lease[x].asked = 0
  :: (lease[x].answered & bit(p)) && lease[x].renewing ->
     lease[x].renewing = false; lease[x].answered = 0; lease[x].asked = 0; lease[x].refused = 0
  :: else
  fi
}

inline end_ttl(p)
{
  d_step {
    N.holder && !N.closed && !(lease[other].state == VALID && (lease[other].support & bit(p))) ->
    drop_request(other, p);
    N.closed = true;
    printf("the ttl of lease %d ends on node %d\n", other, p)
  }
}

#ifdef KEY_ENDS_WITH_THE_TTL
#define is_kept(p) false
#else
#define is_kept(p) (is_delayed(other) && (lease[other].support & bit(p)))
#endif
inline expire(p)
{
  d_step {
    N.holder && N.closed && !is_kept(p) ->
    printf("the hold of lease %d on node %d expires\n", other, p);
    N.holder = 0; N.closed = false
  }
}

/* --- releases, undos, and an operator ---------------------------------------------------------- */

/* A release counts at any time: it says that the holder has stopped. */
inline release()
{
  d_step {
    is_delayed(a) && !L.renewing && !L.forcing ->
    L.state = RELEASED; L.support = 0;
    printf("lease %d is released\n", a)
  }
}

inline end(p)
{
  d_step {
    (L.state == RELEASED || L.state == GIVEN_UP) && !(L.ended & bit(p)) ->
    L.ended = L.ended | bit(p);
    if
#ifdef RELEASE_KEEPS_THE_DELAY
    :: N.holder == a + 1 -> N.closed = true
#else
    :: N.holder == a + 1 -> N.holder = 0; N.closed = false
#endif
    :: else
    fi;
    if :: L.state == RELEASED -> printf("node %d releases lease %d\n", p, a) :: else -> printf("node %d undoes lease %d\n", p, a) fi
  }
}

/* From here on its holder counts on the lease only by a renewal on nodes that the command missed. */
inline force()
{
  d_step {
    L.state == VALID && !L.renewing && !L.forcing ->
    L.forcing = true; L.state = DELAYED;
    printf("an operator ends lease %d\n", a)
  }
}

inline force_on(p)
{
  d_step {
    L.forcing && !(L.forced & bit(p)) ->
    L.forced = L.forced | bit(p);
    if
#ifdef FORCE_DELETES
    :: N.holder == a + 1 -> N.holder = 0; N.closed = false
#else
    :: N.holder == a + 1 -> N.closed = true
#endif
    :: else
    fi;
    /* A renewal that this node answered before gives no validity: the operator has ended the lease. */
    drop_request(a, p);
    printf("node %d has the forced release of lease %d\n", p, a)
  }
}

inline force_on_quorum(p, q)
{
  d_step {
    L.forcing && !L.renewing && !L.told_lost && (L.forced & bit(p)) && (L.forced & bit(q)) ->
    L.told_lost = true;
    printf("lease %d is told forced\n", a)
  }
}

#define ON_EACH_NODE(step) :: step(0) :: step(1) :: step(2)
#define ON_EACH_QUORUM(step) :: step(0, 1) :: step(0, 2) :: step(1, 2)

proctype Using(byte a)
{
end_now:
  do
  ON_EACH_NODE(mint)
  ON_EACH_QUORUM(succeed)
  :: give_up()
  :: begin_renewal()
  ON_EACH_NODE(renew)
  ON_EACH_QUORUM(lose)
  :: lapse()
  :: end_delay()
  :: release()
  ON_EACH_NODE(end)
  :: force()
  ON_EACH_NODE(force_on)
  ON_EACH_QUORUM(force_on_quorum)
  od
}

proctype Time()
{
end_now:
  do
  ON_EACH_NODE(end_ttl)
  ON_EACH_NODE(expire)
  od
}

init {
  atomic {
    run Using(0); run Using(1);
#if LEASES > 2
    run Using(2);
#endif
    run Time()
  }
}
