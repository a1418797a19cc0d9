//go:build linux

// Package rendezvous lets the ranks of a job find each other and exchange small messages: through a Unix socket on one host
// (which passes descriptors too), through TCP with a shared secret between hosts.
//
// Rank 0 serves, the others connect and try again until the deadline. Who is no rank of this job is closed and forgotten:
// another user, a wrong secret, garbage, a connection that says nothing, a second rank 3. A rank that was configured
// otherwise ends the group on every rank at once, with both values. Once the group stands, nobody else is let in and nothing
// is left in the file system; the connections stay, so that the end of a process is seen by all (Done).
package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// Field is one thing that must be equal on all ranks.
type Field struct {
	Name, Value string
}

// Config says who this rank is and where the others are.
type Config struct {
	Rank, World int
	// Address is host:port of rank 0, for TCP; empty: a Unix socket named by Job.
	Address string
	// Job tells the jobs of one user on one host apart. Unix socket only.
	Job string
	// Dir holds the socket; empty: DefaultDir.
	Dir string
	// Secret is shared by all ranks; TCP does without it not at all (ErrSecret).
	Secret []byte
	// Fields are compared with rank 0's.
	Fields []Field
	// Timeout is how long the group may take to form, over a context without an earlier deadline; 0: one minute.
	Timeout time.Duration

	uid int // whom to accept, for tests: -1 nobody; 0: this process's user
}

const (
	maxWorld       = 1024
	maxBlob        = 64 << 10
	maxHello       = 16 << 10
	maxText        = 2 << 10
	maxFiles       = 16
	defaultTimeout = time.Minute
	// A connection has this long to say who it is, so that silent ones do not pile up; and no more than so many at once.
	helloTimeout = 5 * time.Second
	maxPending   = 64
	// After its own deadline a rank waits a little for rank 0's word on who is missing.
	grace        = 500 * time.Millisecond
	writeTimeout = 10 * time.Second
)

// ErrSecret: TCP without a secret, or with one that is too short.
var ErrSecret = errors.New("rendezvous: a TCP rendezvous needs a shared secret of at least 16 bytes")

// MismatchError says that ranks were configured differently.
type MismatchError struct {
	Name        string
	RankA       int // rank 0
	ValueA      string
	RankB       int
	ValueB      string
	fromMessage string
}

func (e *MismatchError) Error() string {
	if e.fromMessage != "" {
		return e.fromMessage
	}
	return fmt.Sprintf("%s is %s on rank %d and %s on rank %d", e.Name, e.ValueA, e.RankA, e.ValueB, e.RankB)
}

// MissingError says who did not come in time.
type MissingError struct {
	Ranks  []int // nil where rank 0 told of several
	Within time.Duration
	Where  string
	Notes  []string // who was turned away meanwhile

	fromMessage string // rank 0's text
}

// only is the number of the one rank that is missing, plus one, as a message carries it; 0: there are several.
func (e *MissingError) only() uint32 {
	if len(e.Ranks) != 1 {
		return 0
	}
	return uint32(e.Ranks[0]) + 1
}

func missingFrom(only uint32, text string) *MissingError {
	e := &MissingError{fromMessage: text}
	if 0 < only && only <= maxWorld {
		e.Ranks = []int{int(only) - 1}
	}
	return e
}

func (e *MissingError) Error() string {
	if e.fromMessage != "" {
		return e.fromMessage
	}
	names := make([]string, len(e.Ranks))
	for i, r := range e.Ranks {
		names[i] = fmt.Sprint(r)
	}
	noun := "rank"
	if len(e.Ranks) > 1 {
		noun = "ranks"
	}
	text := fmt.Sprintf("%s %s did not come to %s within %v", noun, strings.Join(names, ", "), e.Where, e.Within.Round(time.Millisecond))
	if len(e.Notes) > 0 {
		text += " (" + strings.Join(e.Notes, "; ") + ")"
	}
	return text
}

// LostError says that a rank's process has ended or given up.
type LostError struct {
	Rank int
	Text string
}

func (e *LostError) Error() string { return e.Text }

func leftError(rank int) *LostError {
	return &LostError{Rank: rank, Text: fmt.Sprintf("rank %d has closed", rank)}
}

// ErrClosed: the group was closed on this rank.
var ErrClosed = errors.New("rendezvous: closed")

// Group is the ranks that have met. AllGather, Broadcast and Barrier are collective: all ranks call the same ones in the
// same order, one at a time. Abort, Done, Err and Close may be called at any time.
type Group struct {
	rank, world int
	members     []*member // rank 0: of each other rank, by rank; others: rank 0 at index 0
	sequence    uint32

	mutex  sync.Mutex
	err    error
	done   chan struct{}
	closed bool
	wg     sync.WaitGroup
}

// member is a connection to another rank, read by a goroutine of its own until it ends.
type member struct {
	rank  int
	link  link
	inbox chan message
	ended chan struct{} // closed when nothing more is read
	left  bool          // said goodbye; written by the reader before it ends, read under Group.mutex
}

func newMember(rank int, l link) *member {
	return &member{rank: rank, link: l, inbox: make(chan message, 1), ended: make(chan struct{})}
}

// Open meets the other ranks. It returns when all are there, or with *MismatchError, *MissingError, ErrSecret, ctx's error
// or what else went wrong.
func Open(ctx context.Context, c Config) (*Group, error) {
	if c.World < 1 || c.World > maxWorld || c.Rank < 0 || c.Rank >= c.World {
		return nil, fmt.Errorf("rendezvous: rank %d of %d; allowed: up to %d ranks, numbered from 0", c.Rank, c.World, maxWorld)
	}
	if c.Address != "" && len(c.Secret) < minSecret {
		return nil, ErrSecret
	}
	if c.Timeout <= 0 {
		c.Timeout = defaultTimeout
	}
	if c.World == 1 {
		return newGroup(c, nil), nil
	}
	if deadline, ok := ctx.Deadline(); ok {
		c.Timeout = min(c.Timeout, time.Until(deadline))
	}
	if c.Rank == 0 {
		ctx, cancel := context.WithTimeout(ctx, c.Timeout)
		defer cancel()
		return serve(ctx, c)
	}
	return connect(ctx, c)
}

func newGroup(c Config, members []*member) *Group {
	return &Group{rank: c.Rank, world: c.World, members: members, done: make(chan struct{})}
}

// Rank is this rank, World the number of all.
func (g *Group) Rank() int  { return g.rank }
func (g *Group) World() int { return g.world }

// Done is closed when the group has failed or was closed; Err then says why.
func (g *Group) Done() <-chan struct{} { return g.done }

// Err is why the group is over: *LostError where a rank is gone, ErrClosed after Close, nil while it stands.
func (g *Group) Err() error {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.err
}

// fail ends the group with the first reason; it says whether this was the first.
func (g *Group) fail(err error) bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if g.err != nil {
		return false
	}
	g.err = err
	close(g.done)
	return true
}

// start reads from a member until its connection ends.
func (g *Group) start(m *member) {
	g.wg.Add(1)
	go func() {
		defer g.wg.Done()
		defer close(m.ended)
		for {
			message, err := m.link.receive(maxBlob + 64)
			if err == nil {
				switch message.kind {
				case kindGather, kindResult:
					select { // no more is read before this rank has asked for it
					case m.inbox <- message:
						continue
					case <-g.done:
						message.closeFiles()
						return
					}
				case kindAbort:
					g.lose(m, int(message.sequence)-1, message.text())
					return
				case kindBye:
					g.leave(m)
					return
				default:
					message.closeFiles()
				}
			}
			g.lose(m, m.rank, fmt.Sprintf("the process of rank %d has ended", m.rank))
			return
		}
	}()
}

func (g *Group) leave(m *member) {
	g.mutex.Lock()
	m.left = true
	g.mutex.Unlock()
	close(m.inbox)
}

// lose ends the group because of what a member said, or no longer can; rank 0 tells the others.
func (g *Group) lose(m *member, rank int, text string) {
	if rank < 0 || rank >= g.world {
		rank = m.rank
	}
	lost := &LostError{Rank: rank, Text: text}
	if g.fail(lost) && g.rank == 0 {
		g.tell(lost, m)
	}
}

// tell sends the reason of the end to all members but one.
func (g *Group) tell(lost *LostError, but *member) {
	for _, m := range g.members {
		if m != but {
			_ = m.link.send(message{kind: kindAbort, sequence: uint32(lost.Rank + 1), payload: clip(lost.Text)}, time.Now().Add(time.Second))
		}
	}
}

// Abort ends the group on all ranks with a reason. It does not wait for them.
func (g *Group) Abort(text string) {
	lost := &LostError{Rank: g.rank, Text: text}
	if g.fail(lost) {
		g.tell(lost, nil)
	}
}

// Close says goodbye and ends the connections; the others do not take it for a death. It returns when nothing of the group
// runs any more. A second Close does nothing.
func (g *Group) Close() {
	g.mutex.Lock()
	again := g.closed
	g.closed = true
	g.mutex.Unlock()
	if again {
		return
	}
	if g.fail(ErrClosed) {
		for _, m := range g.members {
			_ = m.link.send(message{kind: kindBye}, time.Now().Add(time.Second))
		}
	}
	for _, m := range g.members {
		m.link.close()
	}
	g.wg.Wait()
}

// next is the member's next message of a kind, within ctx.
func (g *Group) next(ctx context.Context, m *member, kind byte) (message, error) {
	select { // what came before the end of the group counts
	case got, open := <-m.inbox:
		return g.accept(m, got, open, kind)
	default:
	}
	select {
	case got, open := <-m.inbox:
		return g.accept(m, got, open, kind)
	case <-g.done:
		return message{}, g.Err()
	case <-ctx.Done():
		err := fmt.Errorf("waiting for rank %d: %w", m.rank, ctx.Err())
		g.Abort(fmt.Sprintf("rank %d gave up waiting for rank %d", g.rank, m.rank))
		return message{}, err
	}
}

func (g *Group) accept(m *member, got message, open bool, kind byte) (message, error) {
	if !open {
		err := leftError(m.rank)
		g.fail(err)
		return message{}, err
	}
	if got.kind != kind || got.sequence != g.sequence {
		got.closeFiles()
		err := fmt.Errorf("rendezvous: rank %d is at step %d, rank %d at step %d", m.rank, got.sequence, g.rank, g.sequence)
		g.Abort(err.Error())
		return message{}, err
	}
	return got, nil
}

func (g *Group) send(m *member, kind byte, payload []byte, files []*os.File) error {
	err := m.link.send(message{kind: kind, sequence: g.sequence, payload: payload, files: files}, time.Now().Add(writeTimeout))
	if err == nil {
		return nil
	}
	// The reader knows better what became of the other side, and is about to say so.
	select {
	case <-g.done:
	case <-m.ended:
	case <-time.After(time.Second):
	}
	g.mutex.Lock()
	left := m.left
	g.mutex.Unlock()
	if left {
		g.fail(leftError(m.rank))
	}
	g.fail(&LostError{Rank: m.rank, Text: fmt.Sprintf("writing to rank %d: %v", m.rank, err)})
	return g.Err()
}

// AllGather gives every rank every rank's blob, by rank. A blob has at most 64 KiB / World bytes.
func (g *Group) AllGather(ctx context.Context, blob []byte) ([][]byte, error) {
	if most := maxBlob/g.world - 8; len(blob) > most {
		return nil, fmt.Errorf("rendezvous: a blob of %d bytes; allowed: up to %d", len(blob), most)
	}
	g.sequence++
	if g.rank != 0 {
		if err := g.send(g.members[0], kindGather, blob, nil); err != nil {
			return nil, err
		}
		got, err := g.next(ctx, g.members[0], kindResult)
		if err != nil {
			return nil, err
		}
		got.closeFiles()
		return splitBlobs(got.payload, g.world)
	}
	blobs := make([][]byte, g.world)
	blobs[0] = slices.Clone(blob)
	for _, m := range g.members {
		got, err := g.next(ctx, m, kindGather)
		if err != nil {
			return nil, err
		}
		got.closeFiles()
		blobs[m.rank] = got.payload
		if len(got.payload) > maxBlob/g.world-8 {
			err := fmt.Errorf("rendezvous: rank %d sent %d bytes", m.rank, len(got.payload))
			g.Abort(err.Error())
			return nil, err
		}
	}
	all := joinBlobs(blobs)
	for _, m := range g.members {
		if err := g.send(m, kindResult, all, nil); err != nil {
			return nil, err
		}
	}
	return blobs, nil
}

// Broadcast gives every rank rank 0's blob and, through a Unix socket, descriptors of its files: the others get files of
// their own, which they close. Only rank 0's arguments count; it gets them back.
func (g *Group) Broadcast(ctx context.Context, blob []byte, files ...*os.File) ([]byte, []*os.File, error) {
	g.sequence++
	if g.rank != 0 {
		got, err := g.next(ctx, g.members[0], kindResult)
		return got.payload, got.files, err
	}
	if len(blob) > maxBlob || len(files) > maxFiles {
		return nil, nil, fmt.Errorf("rendezvous: %d bytes and %d files; allowed: up to %d and %d", len(blob), len(files), maxBlob, maxFiles)
	}
	for _, m := range g.members {
		if err := g.send(m, kindResult, blob, files); err != nil {
			return nil, nil, err
		}
	}
	return blob, files, nil
}

// Barrier returns when all ranks have called it.
func (g *Group) Barrier(ctx context.Context) error {
	_, err := g.AllGather(ctx, nil)
	return err
}
