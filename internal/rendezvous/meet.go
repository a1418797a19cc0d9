//go:build linux

package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// where names the meeting place in errors.
func (c *Config) where() string {
	if c.Address != "" {
		return c.Address
	}
	return c.socketPath()
}

// doorkeeper lets ranks in while the group forms.
type doorkeeper struct {
	config   Config
	listener net.Listener
	arrivals chan *member
	gone     chan *member
	wrong    chan error
	stop     chan struct{} // closed when the group has formed or failed

	mutex   sync.Mutex
	pending map[net.Conn]struct{}
	notes   []string
	ended   bool
	wg      sync.WaitGroup
}

// serve is rank 0: it waits until every other rank is there.
func serve(ctx context.Context, c Config) (*Group, error) {
	var listener net.Listener
	var err error
	if c.Address != "" {
		listener, err = net.Listen("tcp", c.Address)
	} else {
		listener, err = listenUnix(ctx, &c)
	}
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	d := &doorkeeper{config: c, listener: listener, arrivals: make(chan *member), gone: make(chan *member),
		wrong: make(chan error), stop: make(chan struct{}), pending: make(map[net.Conn]struct{})}
	d.wg.Add(1)
	go d.accept()
	members, err := d.form(ctx)
	d.end()
	if err != nil {
		var text string
		kind, sequence := kindAbort, uint32(1) // rank 0's, plus one
		var mismatch *MismatchError
		var missing *MissingError
		if text = err.Error(); errors.As(err, &mismatch) {
			kind = kindMismatch
		} else if errors.As(err, &missing) {
			kind, sequence = kindMissing, missing.only()
		}
		for _, m := range members {
			if m != nil {
				_ = m.link.send(message{kind: kind, sequence: sequence, payload: clip(text)}, time.Now().Add(time.Second))
				m.link.close()
			}
		}
		return nil, err
	}
	g := newGroup(c, members[1:])
	for _, m := range g.members {
		m.link.deadline(time.Time{})
		if err := m.link.send(message{kind: kindWelcome}, time.Now().Add(writeTimeout)); err != nil {
			g.lose(m, m.rank, fmt.Sprintf("the process of rank %d has ended", m.rank))
			g.Close()
			return nil, g.Err()
		}
	}
	for _, m := range g.members {
		g.start(m)
	}
	return g, nil
}

// form collects the ranks; the members it returns beside an error are to be told of it.
func (d *doorkeeper) form(ctx context.Context) ([]*member, error) {
	c := &d.config
	members := make([]*member, c.World)
	for there := 1; there < c.World; {
		select {
		case m := <-d.arrivals:
			if members[m.rank] != nil {
				d.refuse(m.link, fmt.Sprintf("rank %d is here already", m.rank))
				continue
			}
			members[m.rank] = m
			there++
			d.wg.Add(1)
			go d.watch(m)
		case m := <-d.gone:
			if members[m.rank] == m {
				d.note(fmt.Sprintf("rank %d came and went", m.rank))
				m.link.close()
				members[m.rank] = nil
				there--
			}
		case err := <-d.wrong:
			return members, err
		case <-ctx.Done():
			if err := context.Cause(ctx); !errors.Is(err, context.DeadlineExceeded) {
				return members, fmt.Errorf("rank 0 gave up: %w", err)
			}
			missing := &MissingError{Within: c.Timeout, Where: c.where()}
			for r := 1; r < c.World; r++ {
				if members[r] == nil {
					missing.Ranks = append(missing.Ranks, r)
				}
			}
			d.mutex.Lock()
			missing.Notes = slices.Clone(d.notes)
			d.mutex.Unlock()
			return members, missing
		}
	}
	return members, nil
}

// watch notices that a rank which waits for the others goes away. Nothing is to be heard from it until it is welcomed, so
// it peeks; it ends with the forming.
func (d *doorkeeper) watch(m *member) {
	defer d.wg.Done()
	for {
		if m.link.ended() {
			select {
			case d.gone <- m:
			case <-d.stop:
			}
			return
		}
		select {
		case <-d.stop:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (d *doorkeeper) accept() {
	defer d.wg.Done()
	for {
		conn, err := d.listener.Accept()
		if err != nil {
			select {
			case <-d.stop:
				return
			case <-time.After(10 * time.Millisecond): // out of descriptors, perhaps
				continue
			}
		}
		d.mutex.Lock()
		full := len(d.pending) >= maxPending
		if !full && !d.ended {
			d.pending[conn] = struct{}{}
			d.wg.Add(1)
			go d.greet(conn)
		} else {
			_ = conn.Close()
		}
		d.mutex.Unlock()
	}
}

// greet finds out who has connected.
func (d *doorkeeper) greet(conn net.Conn) {
	defer d.wg.Done()
	m, err := d.recognise(conn)
	d.mutex.Lock()
	delete(d.pending, conn)
	d.mutex.Unlock()
	if err != nil {
		var mismatch *MismatchError
		if errors.As(err, &mismatch) {
			// The group cannot form: this rank is told as the others are.
			_ = m.link.send(message{kind: kindMismatch, payload: clip(err.Error())}, time.Now().Add(time.Second))
			select {
			case d.wrong <- err:
			case <-d.stop:
			}
		} else {
			d.note(fmt.Sprintf("turned away %s: %s", from(conn), err))
		}
		_ = conn.Close()
		return
	}
	select {
	case d.arrivals <- m:
	case <-d.stop:
		_ = conn.Close()
	}
}

func from(conn net.Conn) string {
	if u, ok := conn.(*net.UnixConn); ok {
		if cred, err := peerOf(u); err == nil {
			return fmt.Sprintf("process %d", cred.Pid)
		}
		return "a process"
	}
	return conn.RemoteAddr().String()
}

// recognise makes a member of a connection, or says why it is none.
func (d *doorkeeper) recognise(conn net.Conn) (*member, error) {
	c := &d.config
	deadline := time.Now().Add(helloTimeout)
	var l link
	if u, ok := conn.(*net.UnixConn); ok {
		if err := c.checkPeer(u); err != nil {
			return nil, err
		}
		l = &unixLink{conn: u}
	} else {
		t := newTCPLink(conn)
		if err := t.challenge(c.Secret, deadline); err != nil {
			return nil, err
		}
		l = t
	}
	m := newMember(0, l) // whose rank its greeting says
	l.deadline(deadline)
	first, err := l.receive(maxHello)
	if err != nil {
		return m, err
	}
	first.closeFiles()
	if first.kind != kindHello {
		return m, errGarbage
	}
	h, err := parseHello(first.payload)
	if err != nil {
		return m, err
	}
	if err := c.compare(&h); err != nil {
		return m, err
	}
	if h.Rank < 1 || h.Rank >= c.World {
		text := fmt.Sprintf("there is no rank %d to come among %d ranks", h.Rank, c.World)
		d.refuse(l, text)
		return m, errors.New(text)
	}
	m.rank = h.Rank
	return m, nil
}

// compare holds another rank's configuration against this one's.
func (c *Config) compare(h *hello) error {
	if h.World != c.World {
		return &MismatchError{Name: "the number of ranks", RankA: 0, ValueA: fmt.Sprint(c.World), RankB: h.Rank, ValueB: fmt.Sprint(h.World)}
	}
	theirs := make(map[string]string, len(h.Fields))
	for _, f := range h.Fields {
		theirs[f.Name] = f.Value
	}
	for _, f := range c.Fields {
		value, there := theirs[f.Name]
		if !there {
			value = "not known"
		}
		if value != f.Value {
			return &MismatchError{Name: f.Name, RankA: 0, ValueA: f.Value, RankB: h.Rank, ValueB: value}
		}
		delete(theirs, f.Name)
	}
	for _, f := range h.Fields {
		if _, left := theirs[f.Name]; left {
			return &MismatchError{Name: f.Name, RankA: 0, ValueA: "not known", RankB: h.Rank, ValueB: f.Value}
		}
	}
	return nil
}

func (d *doorkeeper) refuse(l link, text string) {
	_ = l.send(message{kind: kindRefuse, payload: clip(text)}, time.Now().Add(time.Second))
	l.close()
}

func (d *doorkeeper) note(text string) {
	const most = 8
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if len(d.notes) < most && !slices.Contains(d.notes, text) {
		d.notes = append(d.notes, text)
	}
}

// end lets nobody else in.
func (d *doorkeeper) end() {
	close(d.stop)
	_ = d.listener.Close()
	d.mutex.Lock()
	d.ended = true
	for conn := range d.pending {
		_ = conn.Close()
	}
	d.mutex.Unlock()
	d.wg.Wait()
}

// connect is every other rank: it tries until rank 0 lets it in.
func connect(ctx context.Context, c Config) (*Group, error) {
	text, err := json.Marshal(hello{Rank: c.Rank, World: c.World, PID: os.Getpid(), Fields: c.Fields})
	if err != nil {
		return nil, err
	}
	if len(text) > maxHello {
		return nil, fmt.Errorf("rendezvous: the configuration takes %d bytes; allowed: up to %d", len(text), maxHello)
	}
	limit := time.Now().Add(c.Timeout)
	ctx, cancel := context.WithDeadline(ctx, limit.Add(grace))
	defer cancel()
	var last error
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		l, err := c.dial(ctx)
		if err == nil {
			g, again, err := c.enter(ctx, l, text)
			if g != nil || !again {
				return g, err
			}
			last = err
		} else {
			last = err
			if c.Address == "" {
				removeStale(c.socketPath())
			}
		}
		if errors.Is(last, errSecretDiffers) || errors.Is(last, errWrongUser) {
			return nil, last
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.DeadlineExceeded) {
			return nil, fmt.Errorf("rank %d gave up: %w", c.Rank, cause)
		}
		if time.Now().After(limit) {
			missing := &MissingError{Ranks: []int{0}, Within: c.Timeout, Where: c.where()}
			if last != nil {
				missing.Notes = []string{last.Error()}
			}
			return nil, missing
		}
	}
}

var errWrongUser = errors.New("rendezvous: the socket is another user's")

// dial connects and makes sure of who is at the other end.
func (c *Config) dial(ctx context.Context) (link, error) {
	var dialer net.Dialer
	if c.Address != "" {
		conn, err := dialer.DialContext(ctx, "tcp", c.Address)
		if err != nil {
			return nil, err
		}
		l := newTCPLink(conn)
		if err := l.prove(c.Secret, time.Now().Add(helloTimeout)); err != nil {
			l.close()
			return nil, err
		}
		return l, nil
	}
	conn, err := dialer.DialContext(ctx, "unix", c.socketPath())
	if err != nil {
		return nil, err
	}
	u := conn.(*net.UnixConn)
	if err := c.checkPeer(u); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("%w: %w", errWrongUser, err)
	}
	return &unixLink{conn: u}, nil
}

// enter introduces this rank and waits for the welcome; again says that another try makes sense.
func (c *Config) enter(ctx context.Context, l link, text []byte) (g *Group, again bool, err error) {
	defer func() {
		if g == nil {
			l.close()
		}
	}()
	deadline, _ := ctx.Deadline()
	stop := context.AfterFunc(ctx, func() { l.deadline(time.Now()) })
	defer stop()
	l.deadline(deadline)
	if err := l.send(message{kind: kindHello, payload: text}, time.Now().Add(helloTimeout)); err != nil {
		return nil, true, err
	}
	m, err := l.receive(maxText)
	if err != nil {
		return nil, true, err
	}
	m.closeFiles()
	switch m.kind {
	case kindWelcome:
	case kindMismatch:
		return nil, false, &MismatchError{fromMessage: m.text()}
	case kindRefuse:
		return nil, false, fmt.Errorf("rendezvous: rank 0 refused rank %d: %s", c.Rank, m.text())
	case kindMissing:
		return nil, false, missingFrom(m.sequence, m.text())
	case kindAbort:
		return nil, false, &LostError{Rank: max(int(m.sequence)-1, 0), Text: m.text()}
	default:
		return nil, false, errGarbage
	}
	if !stop() {
		return nil, false, fmt.Errorf("rank %d gave up: %w", c.Rank, ctx.Err())
	}
	l.deadline(time.Time{})
	g = newGroup(*c, []*member{newMember(0, l)})
	g.start(g.members[0])
	return g, false, nil
}
