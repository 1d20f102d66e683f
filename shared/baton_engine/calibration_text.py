"""The text on which the scales of KV in 8 bits are measured: prose, code, tables and several languages.

Pods of different versions must measure the same, or they refuse each other's KV. So the text never changes.
"""

TEXT = """\
The lighthouse stood at the end of a long spit of sand, where the river met the sea. Every evening, an hour before \
sunset, the keeper walked out along the path with a lantern and a notebook. She wrote down the direction of the wind, \
the height of the waves, and the names of the ships that passed. On the third of October she counted fourteen ships: \
nine trawlers, three freighters, one tanker, and a small sailing boat whose name she could not read.

Question: A train leaves at 09:40 and arrives at 13:05. How long does the journey take, and what is its average speed \
if the distance is 287 kilometres?
Answer: From 09:40 to 13:05 there are 3 hours and 25 minutes, which is 205 minutes. 287 km / (205 / 60) h = 84.0 km/h.

def binary_search(items: list[int], wanted: int) -> int | None:
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return None

{"id": 4711, "name": "Ana María", "tags": ["new", "priority"], "address": {"city": "Zürich", "zip": "8004"}, \
"balance": -12.50, "active": true, "notes": null}

| month | rainfall (mm) | sunshine (h) |
|-------|---------------|--------------|
| March | 61.2          | 118          |
| April | 48.7          | 164          |

El agua hierve a cien grados al nivel del mar. Die Bibliothek ist am Montag geschlossen. Le marché ouvre à sept \
heures. 图书馆星期一不开门。 В понедельник библиотека закрыта. المكتبة مغلقة يوم الاثنين.

<p class="note">Dear all,<br>please send your comments by Friday &mdash; later ones can't be included.</p>

"Are you sure?" he asked. "No," she said, "but nobody else has looked at the numbers since 1998, and somebody must." \
They took the stairs to the archive, found the box marked C-117, and began to read. The first page was a letter. The \
second page was a list of payments, each with a date, a sum and two initials. The third page was blank, except for a \
single line at the bottom: $x^2 + y^2 = z^2$ has solutions; for $n > 2$, $x^n + y^n = z^n$ has none.
"""
