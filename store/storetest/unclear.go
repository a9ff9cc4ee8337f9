package storetest

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/oncehttp/oncehttp"
)

var (
	errAckLost  = errors.New("storetest: the acknowledgement was lost")
	errCallLost = errors.New("storetest: the call was lost")
)

// unclear makes a write and reports an error all the same, as a connection
// does that breaks between the commit and the answer.
type unclear struct{ oncehttp.KeyStore }

func (u unclear) Create(ctx context.Context, r oncehttp.Record) (oncehttp.Record, bool, error) {
	if _, _, err := u.KeyStore.Create(ctx, r); err != nil {
		return oncehttp.Record{}, false, err
	}
	return oncehttp.Record{}, false, errAckLost
}

func (u unclear) Update(ctx context.Context, r oncehttp.Record) (oncehttp.Record, error) {
	if _, err := u.KeyStore.Update(ctx, r); err != nil {
		return oncehttp.Record{}, err
	}
	return oncehttp.Record{}, errAckLost
}

func ownerTells(t *testing.T, s *suite) {
	stores := s.pair(t)
	mine, lossy := claim("1", "me 1-1"), unclear{stores[0]}
	_, _, err := lossy.Create(t.Context(), mine)
	require.ErrorIs(t, err, errAckLost)
	for _, store := range stores {
		got := mustGet(t, store, "1")
		require.Equal(t, mine.Owner, got.Owner, "the owner after a claim whose acknowledgement was lost")
		require.EqualValues(t, 1, got.Version)
		mine.Version = 1
		same(t, mine, got, "the record")
	}
	again, created, err := stores[1].Create(t.Context(), claim("1", "me 1-1"))
	require.NoError(t, err)
	require.False(t, created, "the same claim made again finds the first")
	require.Equal(t, mine.Owner, again.Owner)

	takeover := mine
	takeover.Owner = "other 2-1"
	_, err = lossy.Update(t.Context(), takeover)
	require.ErrorIs(t, err, errAckLost)
	got := mustGet(t, stores[1], "1")
	require.Equal(t, takeover.Owner, got.Owner, "the owner after a take-over whose acknowledgement was lost")
	require.EqualValues(t, 2, got.Version)
	_, err = stores[0].Update(t.Context(), takeover)
	require.ErrorIs(t, err, oncehttp.ErrConflict, "the same write made again")
	mine.State = oncehttp.StateDone
	_, err = stores[0].Update(t.Context(), mine)
	require.ErrorIs(t, err, oncehttp.ErrConflict, "the late settle of an owner that was overtaken")
	same(t, got, mustGet(t, stores[0], "1"), "the record")
}
